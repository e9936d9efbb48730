"""Selective activation checkpointing for eager code; also importable as `remat.checkpointing`.

`plan` estimates a model's training step, and chooses the modules to checkpoint within a memory
budget. `check` measures a plan on a real step. `apply` checkpoints the modules that a plan names::

    plan = remat.sac.plan(model, (x,), memory="12GiB")
    remat.sac.apply(model, plan)
"""

from __future__ import annotations

from remat.sac.api.apply import apply as apply
from remat.sac.api.apply import remove as remove
from remat.sac.api.checkpointing import Checked as Checked
from remat.sac.api.checkpointing import check as check
from remat.sac.api.policy import planned as planned
from remat.sac.estimation.estimator import SACEstimator as SACEstimator
from remat.sac.estimation.modules import estimate as estimate
from remat.sac.estimation.stats import MSPS as MSPS
from remat.sac.estimation.stats import SACGreedyOrderMeta as SACGreedyOrderMeta
from remat.sac.estimation.stats import SACStats as SACStats
from remat.sac.estimation.stats import SACTradeOffStats as SACTradeOffStats
from remat.sac.estimation.tradeoff import greedy_order as greedy_order
from remat.sac.estimation.tradeoff import upper_envelope as upper_envelope
from remat.sac.policies.compose import compose as compose
from remat.sac.policies.region import context_fn as context_fn
from remat.sac.run.operators import is_skipped as is_skipped
from remat.sac.solve.choices import (
    get_optimal_checkpointing_policy_per_module as get_optimal_checkpointing_policy_per_module,
)
from remat.sac.solve.milp import plan as plan
from remat.sac.solve.plan import ModulePlan as ModulePlan
from remat.sac.solve.plan import SACPlan as SACPlan

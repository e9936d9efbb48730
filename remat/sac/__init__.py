"""Selective activation checkpointing for eager code: what each module could recompute."""

from __future__ import annotations

from remat.sac.api.apply import apply as apply
from remat.sac.api.apply import remove as remove
from remat.sac.api.policy import planned as planned
from remat.sac.api.policy import policy as policy
from remat.sac.estimate.estimator import Estimate as Estimate
from remat.sac.estimate.estimator import SACEstimator as SACEstimator
from remat.sac.estimate.stats import MSPS as MSPS
from remat.sac.estimate.stats import SACGreedyOrderMeta as SACGreedyOrderMeta
from remat.sac.estimate.stats import SACStats as SACStats
from remat.sac.estimate.stats import SACTradeOffStats as SACTradeOffStats
from remat.sac.estimate.tradeoff import exact_frontier as exact_frontier
from remat.sac.estimate.tradeoff import greedy_order as greedy_order
from remat.sac.estimate.tradeoff import upper_envelope as upper_envelope
from remat.sac.policies.compose import compose as compose
from remat.sac.policies.region import context_fn as context_fn
from remat.sac.run.operators import is_skipped as is_skipped
from remat.sac.solve.choices import (
    get_optimal_checkpointing_policy_per_module as get_optimal_checkpointing_policy_per_module,
)
from remat.sac.solve.choices import optimal_checkpointing_policy as optimal_checkpointing_policy
from remat.sac.solve.plan import ModulePlan as ModulePlan
from remat.sac.solve.plan import SACPlan as SACPlan

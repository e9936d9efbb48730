"""Selective activation checkpointing for eager code: what each module could recompute."""

from __future__ import annotations

from remat.sac.apply import apply as apply
from remat.sac.apply import remove as remove
from remat.sac.compose import compose as compose
from remat.sac.estimate import Estimate as Estimate
from remat.sac.estimator import SACEstimator as SACEstimator
from remat.sac.greedy import greedy_order as greedy_order
from remat.sac.optimum import exact_frontier as exact_frontier
from remat.sac.optimum import (
    get_optimal_checkpointing_policy_per_module as get_optimal_checkpointing_policy_per_module,
)
from remat.sac.optimum import optimal_checkpointing_policy as optimal_checkpointing_policy
from remat.sac.plan import ModulePlan as ModulePlan
from remat.sac.plan import SACPlan as SACPlan
from remat.sac.policy import planned as planned
from remat.sac.policy import policy as policy
from remat.sac.region import context_fn as context_fn
from remat.sac.skipped import is_skipped as is_skipped
from remat.sac.stats import MSPS as MSPS
from remat.sac.stats import SACGreedyOrderMeta as SACGreedyOrderMeta
from remat.sac.stats import SACStats as SACStats
from remat.sac.stats import SACTradeOffStats as SACTradeOffStats
from remat.sac.tradeoff import upper_envelope as upper_envelope

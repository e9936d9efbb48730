"""How a decision came about, and by which rules the cut that it refers to was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInfo:
    """How a decision came about.

    Attributes:
        capacity: bytes that the decision may save; None where there is no limit.
        full_bytes: bytes that the runtime-optimal cut saves.
        least_bytes: the least that any decision saves.
        solver: the solver that was asked, or ``min-cut`` where that cut is all there is or costs less.
        items: nodes of the graph problem that a solver decided; 0 without one.
        deterministic: False if a clock ended the search.
        elapsed_s: seconds that the solver took.
        recompute_bound: what no decision within the capacity can cost less than, as far as the
            solver has proven.
        region_budget: the share that the code set for its region, where that held.
        least_because: why nothing less can be saved, where a share of less was raised to that.
        exposed_time: time that runs wait for copies to and from the host.
        peak_limit: the peak in bytes that a share of it came to; 0 under any other budget.
    """

    capacity: int | None = None
    full_bytes: int | None = None
    least_bytes: int | None = None
    solver: str = "min-cut"
    items: int = 0
    deterministic: bool = True
    elapsed_s: float = 0.0
    recompute_bound: int = 0
    region_budget: float | None = None
    least_because: str = ""
    exposed_time: int = 0
    peak_limit: int = 0


@dataclass(frozen=True)
class BanRules:
    """Which heuristics apply; each keeps some nodes from being recomputed.

    Attributes:
        ban_used_far_apart: users of one value with something unfusible between them.
        ban_long_fusible_chains: chains of fusible nodes over `LONG_CHAIN` long.
        ban_materialized_backward: what backward writes to memory anyway.
        ban_not_in_allowlist: whatever is not known to be cheap; without it, only random operators
            and compute-intensive ones.
        ban_reductions: results under a quarter of their inputs.
    """

    ban_used_far_apart: bool = True
    ban_long_fusible_chains: bool = True
    ban_materialized_backward: bool = True
    ban_not_in_allowlist: bool = True
    ban_reductions: bool = True

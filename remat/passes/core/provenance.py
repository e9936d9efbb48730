"""Limits on saved bytes, a record of how a decision was found, and switches for the minimum cut's heuristics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLimits:
    """Limits on the bytes that forward saves for backward.

    Attributes:
        capacity: bytes that the decision may save; None without a limit.
        full_bytes: bytes that the runtime-optimal cut saves; None if not computed.
        least_bytes: fewest bytes that any decision can save; None if not computed.
        region_budget: budget ratio that the user's code sets for the graph, with
            ``torch.autograd.graph.region_activation_memory_budget``; None if the code sets none.
        least_because: reasons why no decision saves less than ``least_bytes``; empty unless a budget
            is below ``least_bytes``.
    """

    capacity: int | None = None
    full_bytes: int | None = None
    least_bytes: int | None = None
    region_budget: float | None = None
    least_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How a decision was found: by which solver and search, with a proven lower bound on the cost of any decision.

    Attributes:
        solver: name of the solver that found the decision; ``min-cut`` if a minimum cut is the
            decision.
        proposer: how a search found the decision, such as ``by prices``; empty without a search.
        items: number of nodes of the graph problem that the solver solved; 0 if no solver ran.
        deterministic: False if a time limit ended the search, so that another run of the solver
            may find another decision.
        elapsed_s: seconds that all calls of the solver took together.
        recompute_bound: proven lower bound on the cost of every decision within the limits, in the
            unit of the cost model.
    """

    solver: str = "min-cut"
    proposer: str = ""
    items: int = 0
    deterministic: bool = True
    elapsed_s: float = 0.0
    recompute_bound: int = 0


@dataclass(frozen=True)
class BanRules:
    """Switches for the heuristics that keep the minimum cut from recomputing certain nodes.

    Attributes:
        ban_used_far_apart: if a value has several users, ban the late users. A user is late if the user
            fuses with the value, and runs after the first unfusible node on the paths that begin at the
            value's users.
        ban_long_fusible_chains: ban the node at which a chain of fusible nodes becomes longer than
            `remat.passes.decide.bans.LONG_CHAIN`.
        ban_materialized_backward: ban values that a node of backward reads without being able to fuse with them.
            Recomputing such a value is not free, because backward writes the recomputed value to
            memory.
        ban_not_in_allowlist: ban every operator that is not known to be cheap. If False, ban only
            random and compute-intensive operators.
        ban_reductions: ban each operator whose result has less than a quarter of the bytes of the
            operator's inputs.
    """

    ban_used_far_apart: bool = True
    ban_long_fusible_chains: bool = True
    ban_materialized_backward: bool = True
    ban_not_in_allowlist: bool = True
    ban_reductions: bool = True

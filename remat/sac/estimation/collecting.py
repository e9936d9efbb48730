"""Compute a module's statistics, such as memory and runtimes, from the operators that ran in one module call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from networkx.utils import UnionFind
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.costs import CostModel, Profile, Roofline
from remat.sac.estimation.stats import PS_PER_MS, SACStats
from remat.sac.run.recording import Call, ModuleSpan

#: Name of the estimation mode that runs and times each operator.
BENCHMARK = "operator-level-benchmark"
#: Dict from the name of each estimation mode to the class of the mode's cost model.
MODES: dict[str, type[CostModel]] = {
    BENCHMARK: Profile,
    "operator-level-cost-model": Roofline,
}


def model_of(mode: str, cost: CostModel | None = None) -> CostModel:
    """Return ``cost``, which must count picoseconds; without ``cost``, return the cost model of the estimation mode."""
    if mode not in MODES:
        raise ProblemError(
            f"estimate_mode_type is {mode!r}; expected {' or '.join(map(repr, MODES))}"
        )
    if cost is None:
        return MODES[mode]()
    if cost.unit != "ps":
        raise ProblemError(
            f"cost model '{cost}' counts {cost.unit}; runtimes need one that counts picoseconds, "
            "such as 'roofline' or 'profile'"
        )
    return cost


def runtimes(calls: Iterable[Call], model: CostModel) -> dict[fx.Node, float]:
    """Return a dict from each operator's node to its runtime in ms; calls that checkpointing ignores are left out.

    The nodes are those in `Call.parts`, for operators that really run.
    """
    parts = [(c, part) for c in calls if not c.skipped for part in c.parts]
    costed = [
        part
        for c, part in parts
        # A measured view takes about a microsecond on a CPU. In other cost models, views and `empty` take no time.
        if isinstance(model, Profile) or not (c.view is not None or ops.is_uninitialised(part))
    ]
    with torch_compat.disable_current_modes():  # a cost model may create tensors of its own
        costs = model.costs(costed)
    ms = {part: ps / PS_PER_MS for part, ps in zip(costed, costs, strict=True)}
    return {part: 0.0 for _, part in parts} | ms


def collect(
    calls: Sequence[Call],
    runtimes: Mapping[fx.Node, float],
    span: ModuleSpan,
    saved: Collection[int],
) -> SACStats:
    """Return the statistics of the operators that ran in one module call.

    Args:
        calls: operators that ran in the call, including skipped ones.
        runtimes: milliseconds of each node in `Call.parts`.
        span: the module call. Storages that the call returned count as 0 bytes, because they stay alive in any case.
        saved: storages that autograd saved for backward.
    """
    counted = [c for c in calls if not c.skipped]
    views = {i for i, c in enumerate(counted) if c.view is not None}
    opaque = {i for i, c in enumerate(counted) if ops.is_opaque(c.node)}
    random_ops = [i for i, c in enumerate(counted) if i in opaque or ops.is_random(c.node)]
    together, copied = _groups(calls, views)
    recomputed = _repeated(copied, together, views, random_ops)
    return SACStats(
        func_names=[str(c.node.target) for c in counted],
        runtimes=[sum(runtimes[part] for part in c.parts) for c in counted],
        memory=[sum(n for key, n in c.allocated if key not in span.outputs) for c in counted],
        view_like_ops=sorted(views | recomputed),
        rand_ops=random_ops,
        saved_autograd_ops=[
            i for i, c in enumerate(counted) if c.returns and all(k in saved for k in c.returns)
        ],
        inplace_ops=sorted(pair for pair in together if pair[0] not in recomputed),
        # An operator that is not declared pure is stored, so it draws no random numbers when the module runs again.
        # Random operators that run again would then draw other numbers, so all random operators are stored.
        force_store_random=span.no_tensor or bool(opaque),
    )


def _groups(calls: Sequence[Call], views: Collection[int]) -> tuple[set[tuple[int, int]], set[int]]:
    """Return pairs of operators that in-place writes tie to one decision, and operators that are always recomputed."""
    first: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    copies: set[int] = set()
    # Pairs (operator, first operator on the written storage), as positions without skipped operators.
    together: set[tuple[int, int]] = set()
    recomputed: set[int] = set()
    index = 0
    for call in calls:
        if call.skipped:
            copies.update(key for key, _ in call.allocated)
            continue
        for key in call.writes:
            if key in copies:
                # `clone` always runs again, and the operator must write to the new copy as well.
                recomputed.add(index)
                continue
            # If the write were stored and an earlier reader recomputed, the reader would read the written value.
            head = first.get(key, index)
            together.add((index, head))
            together.update((r, head) for r in readers.get(key, ()) if r != head)
        for key in call.returns:
            first.setdefault(key, index)
        if index not in views:
            for key in call.reads:
                readers.setdefault(key, []).append(index)
        index += 1
    return together, recomputed


def _repeated(
    copied: Collection[int],
    together: Iterable[tuple[int, int]],
    views: Collection[int],
    random_ops: Iterable[int],
) -> set[int]:
    """Return the operators in ``copied``, and all operators that must be recomputed together with one of them."""
    # If one operator of a pair must be recomputed, so must the other. If one random operator must be
    # recomputed, all must.
    groups = UnionFind(copied)
    for op, first in together:
        if first not in views:
            groups.union(op, first)
    groups.union(*random_ops)
    heads = {groups[op] for op in copied}
    return {op for op in groups if groups[op] in heads}

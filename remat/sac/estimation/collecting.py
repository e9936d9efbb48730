"""From the operators that ran in one call of a module to its statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.costs import CostModel, Profile, Roofline
from remat.sac.estimation.stats import PS_PER_MS, SACStats
from remat.sac.run.recording import Call, ModuleSpan

#: The mode in which operators really run.
BENCHMARK = "operator-level-benchmark"
#: Names of the modes, with the cost model behind each.
MODES: dict[str, type[CostModel]] = {
    BENCHMARK: Profile,
    "operator-level-cost-model": Roofline,
}


def model_of(mode: str, cost: CostModel | None = None) -> CostModel:
    """The cost model of a mode, or the one that is given for it.

    Raises:
        ProblemError: no such mode, or the model does not count picoseconds.
    """
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
    """Milliseconds of everything that the calls run.

    Where runtimes are measured, views are as well: on a CPU they take their microsecond. A model
    gives them nothing, nor memory that is allocated and not written.
    """
    shown = [c for c in calls if not c.skipped]
    if isinstance(model, Profile):
        asked = [part for c in shown for part in c.parts]
    else:
        asked = [
            part
            for c in shown
            if c.view is None
            for part in c.parts
            if not ops.is_uninitialised(part)
        ]
    found = {part: 0.0 for c in shown for part in c.parts}
    with torch_compat.disable_current_modes():  # a model may make tensors of its own
        costs = model.costs(asked)
    found.update((n, ps / PS_PER_MS) for n, ps in zip(asked, costs, strict=True))
    return found


def collect(
    calls: Sequence[Call],
    runtimes: Mapping[fx.Node, float],
    span: ModuleSpan,
    saved: Collection[int],
) -> SACStats:
    """The statistics of one call of a module.

    Args:
        calls: the operators that ran in it, those that are skipped included.
        runtimes: milliseconds of each node in `Call.parts`.
        span: the call of the module. Storages that it returned live whatever is decided.
        saved: storages that autograd kept.
    """
    shown = [c for c in calls if not c.skipped]
    views = {i for i, c in enumerate(shown) if c.view is not None}
    drawn = [i for i, c in enumerate(shown) if c.is_random or c.is_opaque]
    together, copied = _groups(calls, views)
    again = _repeated(copied, together, views, drawn)
    return SACStats(
        func_names=[c.name for c in shown],
        runtimes=[sum(runtimes[part] for part in c.parts) for c in shown],
        memory=[sum(n for key, n in c.made if key not in span.outputs) for c in shown],
        view_like_ops=sorted(views | again),
        rand_ops=drawn,
        saved_autograd_ops=[
            i for i, c in enumerate(shown) if c.returns and all(k in saved for k in c.returns)
        ],
        inplace_ops=sorted(pair for pair in together if pair[0] not in again),
        # What may draw is stored, and so draws nothing when the module runs again: the rest would then
        # draw other numbers.
        force_store_random=span.no_tensor or any(c.is_opaque for c in shown),
    )


def _groups(calls: Sequence[Call], views: Collection[int]) -> tuple[set[tuple[int, int]], set[int]]:
    """Pairs of operators that are decided as one, and operators that must run again.

    Each operator that writes to a storage is decided with the first on it. So is what read that
    storage before: where the written value is stored, a repeated read would find it instead of the
    earlier one. What writes to a copy that is made again each time must be repeated with it.
    """
    first: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    copies: set[int] = set()
    together: set[tuple[int, int]] = set()
    again: set[int] = set()
    index = 0
    for call in calls:
        if call.skipped:
            copies.update(key for key, _ in call.made)
            continue
        for key in call.writes:
            if key in copies:
                again.add(index)
                continue
            head = first.get(key, index)
            together.add((index, head))
            together.update((r, head) for r in readers.get(key, ()) if r != head)
        for key in call.returns:
            first.setdefault(key, index)
        if index not in views:
            for key in call.reads:
                readers.setdefault(key, []).append(index)
        index += 1
    return together, again


def _repeated(
    copied: Collection[int],
    together: Collection[tuple[int, int]],
    views: Collection[int],
    drawn: Collection[int],
) -> set[int]:
    """All that must run again because some must: groups, and random operators, stay as one."""
    again = set(copied)
    while True:
        more = {
            i
            for pair in together
            if again.intersection(pair) and pair[1] not in views
            for i in pair
        }
        if again.intersection(drawn):
            more.update(drawn)
        if more <= again:
            return again
        again |= more

"""What the estimator knows about the operators of a module, and what of it is decided together.

The classes and their fields are those of ``torch.distributed._tools.sac_estimator``, so that tools
written for either take the other's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from networkx.utils import UnionFind

from remat.errors import ProblemError

#: Integer units in a millisecond: runtimes are compared in picoseconds.
PS_PER_MS = 10**9


@dataclass
class SACStats:
    """Operators of one module, in the order in which they ran.

    Attributes:
        func_names: operators' names, ``"aten.mm.default"``.
        runtimes: milliseconds each.
        memory: bytes of the storages that each allocates; 0 for views, and for what makes an output
            of the module, which lives whatever is decided.
        view_like_ops: operators that return views.
        rand_ops: operators that draw random numbers, or may: those that are not known to be functions of
            their inputs (`remat.declare_pure`).
        saved_autograd_ops: operators whose result autograd keeps for backward.
        inplace_ops: (operator, first operator on the same storage) for what works in place; an
            operator on an argument of the module is its own first.
        force_store_random: whether random results must be stored, because the module is given no
            tensor from which they could be computed again, or because one of them may do more than draw.
    """

    func_names: list[str]
    runtimes: list[float]
    memory: list[int]
    view_like_ops: list[int]
    rand_ops: list[int]
    saved_autograd_ops: list[int]
    inplace_ops: list[tuple[int, int]]
    force_store_random: bool

    def __len__(self) -> int:
        return len(self.func_names)


class MSPS(NamedTuple):
    """One candidate for recomputation: an operator, or a group that is decided as one.

    Attributes:
        func_names: names of the operators in it.
        op_idx: the operator, or the head of the group.
        memory: bytes that recomputing frees.
        runtime: milliseconds that recomputing takes.
        msps: bytes per millisecond; infinite where recomputing takes no time.
    """

    func_names: set[str]
    op_idx: int
    memory: int
    runtime: float
    msps: float


@dataclass
class SACTradeOffStats:
    """Memory against time for one module, as a piecewise-linear upper envelope.

    Attributes:
        n_segments: number of segments.
        slopes: slope of each segment.
        intercepts: intercept of each segment.
        fit_breaks: where segments begin and end, one more than segments.
        tradeoff_curve: fraction of memory discarded to fraction of runtime recomputed.
        sac_memory: bytes of all operators.
        sac_runtime: milliseconds of all operators.
    """

    n_segments: int
    slopes: list[float]
    intercepts: list[float]
    fit_breaks: list[float]
    tradeoff_curve: OrderedDict[float, float]
    sac_memory: int
    sac_runtime: float


@dataclass
class SACGreedyOrderMeta:
    """The greedy order of one module.

    Attributes:
        recomputed_ops: operators that are always recomputed.
        stored_ops: operators, or heads of groups, that are always stored.
        inplace_op_groups: head of each in-place group to the operators in it.
        random_ops_group: head of the random group to the operators in it.
        msps_meta: candidates, most bytes per time first.
    """

    recomputed_ops: set[int]
    stored_ops: set[int]
    inplace_op_groups: dict[int, set[int]]
    random_ops_group: dict[int, set[int]]
    msps_meta: list[MSPS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Operators that are stored or recomputed as one.

    Attributes:
        ops: the operators, in order; the first is the head.
        nbytes: bytes that storing them takes.
        runtime_ps: picoseconds that recomputing them takes.
    """

    ops: tuple[int, ...]
    nbytes: int
    runtime_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The operators of a module by what may be decided about them.

    Attributes:
        free: what is decided, in the order of its first operators.
        stored: what is stored in any case.
        recomputed: views: recomputed in any case.
    """

    free: tuple[Item, ...]
    stored: tuple[Item, ...]
    recomputed: tuple[int, ...]


def group(stats: SACStats) -> Grouping:
    """Merges what must be decided together: in-place groups, and all random operators.

    An in-place group is everything that writes to one storage, with the operator that made it. It
    is stored if the module did not make that storage, that is, if the first operator on it works in
    place itself or is a view; else recomputing would write to the caller's memory twice. Random
    operators, and every group with one of them in it, are stored if `SACStats.force_store_random` says so.
    Groups that share an operator are one.

    Raises:
        ProblemError: lengths or indices do not fit.
    """
    check(stats)
    views = set(stats.view_like_ops)
    together = UnionFind(range(len(stats)))
    written = [(op, first) for op, first in stats.inplace_ops if op not in views]
    for pair in written:
        together.union(*pair)
    drawn = [op for op in stats.rand_ops if op not in views]
    together.union(*drawn)
    kept = {together[op] for op, first in written if op == first or first in views}
    if stats.force_store_random:
        kept |= {together[op] for op in drawn}
    members: dict[int, list[int]] = {}
    for i in range(len(stats)):
        if i not in views:
            members.setdefault(together[i], []).append(i)
    items = [(head in kept, _item(stats, ops)) for head, ops in members.items()]
    return Grouping(
        free=tuple(item for stored, item in items if not stored),
        stored=tuple(item for stored, item in items if stored),
        recomputed=tuple(sorted(views)),
    )


def _item(stats: SACStats, ops: list[int]) -> Item:
    return Item(
        ops=tuple(ops),
        nbytes=sum(stats.memory[i] for i in ops),
        runtime_ps=sum(round(stats.runtimes[i] * PS_PER_MS) for i in ops),
    )


def check(stats: SACStats) -> None:
    """Refuses statistics that do not fit together.

    Raises:
        ProblemError: naming the field.
    """
    n = len(stats.func_names)
    for name in ("runtimes", "memory"):
        if len(getattr(stats, name)) != n:
            raise ProblemError(f"{name} has {len(getattr(stats, name))} entries for {n} operators")
    indices = [
        *stats.view_like_ops,
        *stats.rand_ops,
        *(i for pair in stats.inplace_ops for i in pair),
    ]
    wrong = next((i for i in indices if not 0 <= i < n), None)
    if wrong is not None:
        raise ProblemError(f"operator {wrong} is named, but there are only {n} operators")
    negative = next((i for i in range(n) if stats.memory[i] < 0 or stats.runtimes[i] < 0), None)
    if negative is not None:
        raise ProblemError(f"operator {negative} has negative memory or runtime")


def difference(before: SACStats, after: SACStats) -> str | None:
    """Where two calls of a module part: "runs … as operator 3 instead of …, which"."""
    for i, (a, b) in enumerate(zip(before.func_names, after.func_names, strict=False)):
        if a != b:
            return f"runs {b} as operator {i} instead of {a}, which"
    if len(before) != len(after):
        return f"runs {len(after)} operators instead of {len(before)}, which"
    return None

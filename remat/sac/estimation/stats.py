"""Statistics of a module's operators, and groups of operators whose results are all stored or all recomputed.

`SACStats`, `MSPS`, `SACTradeOffStats` and `SACGreedyOrderMeta` have the fields of the classes with the same names in
``torch.distributed._tools.sac_estimator``. Code written for PyTorch's classes therefore accepts objects of remat's
classes, too. The decision for an operator is whether its result is stored or recomputed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from networkx.utils import UnionFind

from remat.errors import ProblemError

#: Picoseconds in a millisecond. Runtimes are passed to solvers in picoseconds, because solvers need integers.
PS_PER_MS = 10**9


@dataclass
class SACStats:
    """Statistics of the operators of one module, in the order in which the operators ran.

    Fields that select operators contain the operators' positions in ``func_names``.

    Attributes:
        func_names: names of the operators, such as ``"aten.mm.default"``.
        runtimes: milliseconds of each operator.
        memory: bytes of the storages that each operator allocates. Views count as 0 bytes. Storages
            that the module returns count as 0, because they stay alive in any case.
        view_like_ops: operators that are always recomputed. Such operators return views, write to a
            copy made by ``clone``, or share a decision with an operator that writes to such a copy.
        rand_ops: operators that draw random numbers, and custom operators that may draw some because
            they are not declared pure (`remat.declare_pure`).
        saved_autograd_ops: operators whose results autograd saves for backward.
        inplace_ops: pairs (operator, first operator on the same storage) that share a decision
            because of in-place writes. An operator that writes to an argument of the module is
            paired with itself, unless an earlier operator returned or wrote the same storage.
        force_store_random: whether results of random operators must be stored. True if the module
            has no tensor among its arguments, or runs a custom operator that is not declared pure.
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
    """Candidate for recomputation: one operator, or a group of operators of which all or none are recomputed.

    PyTorch's name for this class, MSPS, stands for memory savings per second.

    Attributes:
        func_names: names of the candidate's operators.
        op_idx: position in `SACStats.func_names` of the operator, or of the group's first operator.
        memory: bytes that recomputing the candidate frees.
        runtime: milliseconds that recomputing the candidate takes.
        msps: ``memory`` per ``runtime``, in bytes per millisecond; infinite if ``runtime`` is 0.
    """

    func_names: set[str]
    op_idx: int
    memory: int
    runtime: float
    msps: float


@dataclass
class SACTradeOffStats:
    """One module's greedy curve of recomputed runtime over discarded memory, and lines fitted above this curve.

    The curve's horizontal axis is the fraction of the module's memory discarded, from 0 to 1. The
    curve's vertical axis is the fraction of the module's runtime recomputed.

    Attributes:
        n_segments: number of line segments fitted above the greedy curve.
        slopes: slope of each segment.
        intercepts: intercept of each segment.
        fit_breaks: fractions of memory discarded at which the segments begin, followed by the
            fraction at which the last segment ends.
        tradeoff_curve: points of the greedy curve, as a dict from the fraction of memory discarded
            to the fraction of runtime recomputed.
        sac_memory: total bytes of the module's operators, the sum of `SACStats.memory`.
        sac_runtime: total milliseconds of the module's operators.
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
    """Greedy order in which to recompute one module's operators: those that free most bytes per millisecond first.

    Operators that are stored or recomputed together form one item, identified by the item's first
    operator; see `Item`. The fields name operators by position in `SACStats.func_names`.

    Attributes:
        recomputed_ops: operators that are always recomputed.
        stored_ops: first operators of the items that are always stored.
        inplace_op_groups: dict from the first operator of each item with in-place writes to all
            operators of the item.
        random_ops_group: dict from the first operator of each item with random operators to all
            operators of the item.
        msps_meta: candidates for recomputation, most freed bytes per millisecond first.
    """

    recomputed_ops: set[int]
    stored_ops: set[int]
    inplace_op_groups: dict[int, set[int]]
    random_ops_group: dict[int, set[int]]
    msps_meta: list[MSPS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Operators of a module whose results are either all stored or all recomputed.

    Attributes:
        ops: the operators, in order; the first one identifies the item.
        nbytes: bytes of the results of all these operators.
        runtime_ps: picoseconds to recompute all these operators.
    """

    ops: tuple[int, ...]
    nbytes: int
    runtime_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Operators of a module, in three groups: decided by a solver, always stored, and always recomputed.

    Attributes:
        free: items that a solver may store or recompute, in the order of their first operators.
        stored: items that are always stored.
        recomputed: operators that are always recomputed; see `SACStats.view_like_ops`.
        recompute_ps: picoseconds that recomputation takes if only the items in ``stored`` are stored.
    """

    free: tuple[Item, ...]
    stored: tuple[Item, ...]
    recomputed: tuple[int, ...]
    recompute_ps: int


def group(stats: SACStats) -> Grouping:
    """Group a module's operators that must share a decision because of in-place writes or random numbers.

    `SACStats.inplace_ops` has pairs of operators on one written storage; all pairs for a storage form an in-place
    group. An in-place group is always stored if the first operator on the group's storage writes in place or returns a
    view. All random operators form one group, which is always stored if `SACStats.force_store_random` is set. Groups
    with a common operator are merged.

    Raises:
        ProblemError: the statistics are inconsistent; see `check`.
    """
    check(stats)
    views = set(stats.view_like_ops)
    together = UnionFind(range(len(stats)))
    pairs = [(op, first) for op, first in stats.inplace_ops if op not in views]
    for pair in pairs:
        together.union(*pair)
    # Views are always recomputed, so no other operators are grouped because of a view.
    random_ops = [op for op in stats.rand_ops if op not in views]
    together.union(*random_ops)
    # Such a storage belongs to the module's caller, and a recomputed group would write to the storage twice.
    always_stored = {together[op] for op, first in pairs if op == first or first in views}
    if stats.force_store_random:
        always_stored |= {together[op] for op in random_ops}
    members: dict[int, list[int]] = {}
    for i in range(len(stats)):
        if i not in views:
            members.setdefault(together[i], []).append(i)
    runtimes_ps = [round(ms * PS_PER_MS) for ms in stats.runtimes]
    free: list[Item] = []
    stored: list[Item] = []
    for head, ops in members.items():
        item = Item(
            ops=tuple(ops),
            nbytes=sum(stats.memory[i] for i in ops),
            runtime_ps=sum(runtimes_ps[i] for i in ops),
        )
        (stored if head in always_stored else free).append(item)
    return Grouping(
        free=tuple(free),
        stored=tuple(stored),
        recomputed=tuple(sorted(views)),
        recompute_ps=sum(runtimes_ps) - sum(item.runtime_ps for item in stored),
    )


def check(stats: SACStats) -> None:
    """Raise a ProblemError if the lengths or positions in statistics are inconsistent."""
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


def difference(before: SACStats, after: SACStats) -> str:
    """Return as text the first difference between the operators of two module calls; empty if there is none.

    The returned text ends with "which", so that an error message can go on: "runs aten.mm.default as operator 3 instead
    of aten.add.Tensor, which".
    """
    for i, (a, b) in enumerate(zip(before.func_names, after.func_names, strict=False)):
        if a != b:
            return f"runs {b} as operator {i} instead of {a}, which"
    if len(before) != len(after):
        return f"runs {len(after)} operators instead of {len(before)}, which"
    return ""

"""Tables of the values that a plan keeps and recomputes, by operator and source line.

Corresponding values of all layers share one row, so a table for 80 layers is as long as a table for 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from remat.report.pictures import shortened
from remat.report.step_view import KeptStorage, OperatorRun
from remat.units import columns, counted, format_bytes, format_cost

#: Largest number of rows of a table. If there are more, the smallest rows are summed in one last row.
MOST_ROWS = 40
#: A row with less than this fraction of a table's total bytes or cost is summed in the last row, too.
_LEAST_ROW = 1 / 1000
#: Largest number of operators for which the text has a line ``remat.declare_pure`` to paste.
MOST_DECLARED = 8
_MIB = 2**20
#: Largest number of characters of a source line in a table.
_SOURCE = 56

T = TypeVar("T")
#: Function that formats a cost in the unit of the problem.
ShowCost = Callable[[float], str]


def explain(keeps: Sequence[KeptStorage], runs: Sequence[OperatorRun], unit: str) -> list[str]:
    """Return the tables of the values that a plan keeps and the operators that it recomputes, as lines of text."""
    show_cost = partial(format_cost, unit=unit)
    lines = []
    if keeps:
        nbytes = format_bytes(sum(k.nbytes for k in keeps))
        lines += [f"  kept activations: {nbytes} in {counted(len(keeps), 'storage')}"]
        lines += _columns(_kept_rows(keeps, show_cost), 4)
        lines += [*_not_offloaded(keeps), *_kept_branches(keeps), *_run_once(keeps)]
    costly = [r for r in runs if r.cost]
    if costly:
        cost = show_cost(_cost(costly))
        lines += [f"  recomputed operators: {len(costly)}, {cost}"]
        lines += _columns(_again_rows(costly, show_cost), 1)
    if len(runs) > len(costly):
        free = counted(len(runs) - len(costly), "node")
        lines += [f"  recomputed at no cost: {free} (views, sizes, elements of tuples)"]
    return lines


def _not_offloaded(keeps: Iterable[KeptStorage]) -> list[str]:
    """Return text lines that list values tagged for offloading but kept on the device, with possible reasons."""
    tagged = [k for k in keeps if k.tagged.endswith("_CPU_OFFLOAD")]
    if not tagged:
        return []
    size = format_bytes(sum(k.nbytes for k in tagged))
    return [
        f"  {size} tagged for the host's memory is saved: it has a symbolic size, is written to, shares memory with "
        "what else is",
        "    kept, exceeds host_memory, or the cost model gives no times",
    ]


def _kept_branches(keeps: Iterable[KeptStorage]) -> list[str]:
    """Return text lines that list the values kept so that backward takes the same branches as forward."""
    lines = []
    for kind, why in (
        ("branch value", "branch values, which backward must not round otherwise"),
        ("compared", "values that backward compares with their maximum"),
    ):
        branches = [k for k in keeps if k.branch == kind]
        if branches:
            size = format_bytes(sum(k.nbytes for k in branches))
            lines.append(f"  kept as {why}: {size} of {_names(k.op for k in branches)}")
    return lines


def _run_once(keeps: Iterable[KeptStorage]) -> list[str]:
    """Return text lines on values kept because operators are not declared pure, with code that declares them pure."""
    undeclared = [k for k in keeps if k.undeclared and not k.tagged]
    if not undeclared:
        return []
    operators = [name for k in undeclared for name in k.undeclared]
    distinct = sorted(set(operators))
    size = format_bytes(sum(k.nbytes for k in undeclared))
    return [
        f"  kept since not declared pure: {size} of {_names(operators)}",
        "    of each: if it draws no random numbers, counts nothing and reads nothing that changes:",
        *(f'      remat.declare_pure("{name}")' for name in distinct[:MOST_DECLARED]),
        *(
            [f"      and {len(distinct) - MOST_DECLARED} more"]
            if len(distinct) > MOST_DECLARED
            else []
        ),
        "    before the step is compiled; afterwards, with torch.compiler.reset() behind it",
    ]


def _kept_rows(keeps: Iterable[KeptStorage], show_cost: ShowCost) -> list[list[str]]:
    """Return the rows of the table of the values that forward keeps for backward, with the header first."""
    groups = grouped(keeps, lambda k: (k.op, k.source, k.nbytes), lambda k: k.nbytes)
    shown = _most_shown([sum(k.nbytes for k in group) for group in groups])
    rows = [["bytes", "", "value", "operator", "to recompute", "per MiB", "source"]]
    for group in groups[:shown]:
        prices = [k.price for k in group if k.price is not None]
        nbytes = sum(k.nbytes for k in group if k.price is not None)
        rate = ""
        if branch := next((k.branch for k in group if k.branch), ""):
            cost = branch
        elif any(k.tagged for k in group):
            cost = f"tagged {next(k.tagged for k in group if k.tagged)}"
        elif not prices:
            cost = "not declared pure" if any(k.undeclared for k in group) else "cannot be"
        else:
            low, high = show_cost(min(prices)), show_cost(max(prices))
            cost = low if low == high else f"{low} to {high}"
            rate = _rate(sum(prices), nbytes, show_cost)
        first, size = group[0], format_bytes(sum(k.nbytes for k in group))
        source = shortened(first.source, _SOURCE)
        rows.append([size, _times(group), first.name, first.op, cost, rate, source])
    if rest := groups[shown:]:
        merged = [k for group in rest for k in group]
        size = format_bytes(sum(k.nbytes for k in merged))
        rows.append([size, _times(merged), f"… in {len(rest)} smaller rows", "", "", "", ""])
    return rows


def _again_rows(runs: Iterable[OperatorRun], show_cost: ShowCost) -> list[list[str]]:
    """Return the rows of the table of recomputed operators, with the header first."""
    groups = grouped(runs, lambda r: (r.source, r.again == "tagged"), lambda r: r.cost or 0)
    shown = _most_shown([*map(_cost, groups)])
    rows = [["cost", "", "operators", "why", "per MiB", "source"]]
    for group in groups[:shown]:
        cost, nbytes = _cost(group), sum(r.nbytes for r in group if r.again == "read")
        why, rate = "on the way to others", ""
        if group[0].again == "tagged":
            why = "tagged for recomputation"
        elif nbytes:
            why, rate = f"frees {format_bytes(nbytes)}", _rate(cost, nbytes, show_cost)
        names = shortened(_names(r.op for r in group), 48)
        source = shortened(group[0].source, _SOURCE)
        rows.append([show_cost(cost), "", names, why, rate, source])
    if rest := groups[shown:]:
        merged = [r for group in rest for r in group]
        cost_text = show_cost(_cost(merged))
        rows.append([cost_text, "", f"{len(merged)} in {len(rest)} smaller rows", "", "", ""])
    return rows


def _cost(runs: Iterable[OperatorRun]) -> int:
    """Return the total cost of runs of operators; an unknown cost counts as 0."""
    return sum(run.cost or 0 for run in runs)


def grouped(
    items: Iterable[T], key: Callable[[T], object], size: Callable[[T], int]
) -> list[list[T]]:
    """Group the items with equal ``key``; return the groups in the order of their total ``size``, largest first."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return sorted(groups.values(), key=lambda group: -sum(map(size, group)))


def _most_shown(sizes: Sequence[int]) -> int:
    """Return how many rows of a table to show; ``sizes`` has one amount per row, such as bytes, largest first."""
    # The caller sums all rows that are not shown in one row. A single such row is shown instead.
    large = sum(size >= sum(sizes) * _LEAST_ROW for size in sizes)
    return min(MOST_ROWS, len(sizes) if len(sizes) - large < 2 else large)


def _names(names: Iterable[str]) -> str:
    """Return distinct names with the number of times that each occurs, as text such as ``"mul × 3, add"``."""
    counts = Counter(names).most_common()
    return ", ".join(f"{name} × {n}" if n > 1 else name for name, n in counts)


def _times(group: Sequence[object]) -> str:
    """Return the number of items that share a table row, as text such as ``"in 5"``; empty for a single item."""
    return f"in {len(group)}" if len(group) > 1 else ""


def _rate(cost: int, nbytes: int, show_cost: ShowCost) -> str:
    """Return the recompute cost per MiB of kept or freed bytes as text; empty if there are no bytes."""
    return show_cost(cost * _MIB / nbytes) if nbytes else ""


def _columns(rows: Sequence[Sequence[str]], indent: int) -> list[str]:
    """Return the rows of a table as lines of text, indented by ``indent``; the first two columns are right-aligned."""
    return [" " * indent + line for line in columns(rows, left=range(2, len(rows[0])))]

"""Tables for people, made from the objects that the commands print as JSON for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from remat.report.tables import show
from remat.units import format_bytes, format_change, format_cost

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from remat.planning.plan import Plan


#: Labels of values whose names in JSON say too little without the documentation.
_LABELS = {
    "more": "more than without remat",
    "once": "cost of each node once",
    "plain_peak_bytes": "peak bytes without checkpointing",
    "plain_ms": "ms without checkpointing",
    "gradient_distance": "relative difference of gradients",
}


def new_table(
    title: str = "",
    heads: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    *,
    left: Collection[int] = (),
) -> Table:
    """Return a table in the style that all commands use.

    Args:
        title: title of the table; empty for none.
        heads: headings of the columns; if all are empty, the table has no header.
        rows: cells of each row.
        left: indices of columns with text, which is left-aligned and wraps. Other columns are right-aligned figures.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(heads),
    )
    for k, head in enumerate(heads):
        if k in left:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def names_table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> Table:
    """Return a table whose cells are texts, with bold names in the first column."""
    table = new_table(title, heads, rows, left=range(len(heads)))
    table.columns[0].style = "bold"
    return table


def show_rows(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str] = (), *, unit: str = ""
) -> None:
    """Print a table with a row for each JSON object.

    Args:
        rows: the objects, at least one, with equal keys.
        keys: keys of the columns; by default all keys.
        unit: unit of the costs.
    """
    keys = keys or list(rows[0])
    cells = [[cell(key, row[key], unit) for key in keys] for row in rows]
    texts = [k for k, key in enumerate(keys) if isinstance(rows[0][key], str | bool | dict)]
    table = new_table("", list(map(_label, keys)), cells, left=texts)
    table.columns[0].no_wrap = True
    show(table)


def show_figures(
    columns: Sequence[Mapping[str, Any]], title: str = "", heads: Sequence[str] = ("", "")
) -> None:
    """Print a table with a row for each key that has a value, and a column for each JSON object.

    The first of ``heads`` is the heading of the keys.
    """
    names = dict.fromkeys(k for figures in columns for k, v in figures.items() if v is not None)
    rows = [
        (_label(name), *(cell(name, f.get(name), str(f.get("unit"))) for f in columns))
        for name in names
    ]
    show(names_table(heads, rows, title))


def cell(name: str, value: Any, unit: str) -> str:
    """Format a value of a JSON object for people, by its type and by the last word of its name."""
    word = name.rpartition("_")[2]
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case dict():
            return "\n".join(f"{key}={item}" for key, item in value.items())
        case list():
            return f"{len(value):,}"
    if word in ("bytes", "capacity"):
        return format_bytes(value)
    if word in ("cost", "bound", "once"):
        return format_cost(value, unit)
    if word == "more":
        return format_change(value)
    if word == "s":
        return f"{value:.3f} s"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _label(name: str) -> str:
    """Return the label of a value for people: ``elapsed`` for ``elapsed_s``."""
    return _LABELS.get(name) or name.replace("_", " ").removesuffix(" s")


def cost_text(resolved: str, requested: str) -> str:
    """Return a text with the cost model and, if the user chose none, the option that selects another device."""
    if requested != "auto":
        return resolved
    name, _, device = resolved.partition(":")
    other = "epyc" if device == "h100" else "h100"
    return f"{resolved}, the tensors' device (--cost {name}:{other} plans for another)"


def plan_table(plan: Plan, title: str, cost: str) -> Table:
    """Return a table with the figures of one plan; ``cost`` is the cost model that the user chose, or ``"auto"``."""
    rows = [
        ("budget", plan.requested.label),
        ("cost model", cost_text(plan.cost, cost)),
        *plan.rows,
    ]
    return names_table(("", ""), rows, title)

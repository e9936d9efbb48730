"""Tables over what `model_types` measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.model_type_steps import LIMIT

Row = dict[str, Any]
#: By type and lowering, what `model_types` wrote down.
Types = Mapping[str, Mapping[str, Any]]


def table(measured: Mapping[str, Any], lower: str) -> Table:
    """One line per type: ours, and PyTorch without us."""
    shown = Table(
        title=f"Two training steps of {len(measured)} model types; lowering: {lower}",
        caption="graphs: joint graphs planned in the first step + graphs compiled in the second, static / "
        "dynamic; saved: share of what the runtime-optimal partition saves; drawn: random operators "
        "replayed, at the least budget; static, dynamic: processor seconds of the first step, "
        "compilation included, at budget 0.5, and by PyTorch without us; error: of all gradients "
        f"together against eager PyTorch's, the worst (allowed {LIMIT[lower]:g})",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    heads = ["type", "drop", "graphs", *(f"saved {b}" for b in shares(measured)), "drawn"]
    heads += ["static", "PyTorch", "dynamic", "error", "PyTorch", "result"]
    for head in heads:
        left = head in ("type", "result")
        shown.add_column(head, justify="left" if left else "right", no_wrap=True)
    for name, found in measured.items():
        shown.add_row(name, *_cells(found, shares(measured)))
    return shown


def shares(measured: Mapping[str, Any]) -> list[float]:
    """The budgets below 1, the largest first."""
    budgets = {r["budget"] for found in measured.values() for r in found["rows"]}
    return sorted((b for b in budgets if b is not None and b < 1), reverse=True)


def _cells(found: Mapping[str, Any], budgets: Sequence[float]) -> list[str]:
    rows: list[Row] = found["rows"]
    ran = [r for r in rows if r["failed"] is None]
    ours, theirs = mine(ran), [r for r in ran if r["budget"] is None]
    saved = (
        _at(ours, "static", b, lambda r: r["saved_bytes"] / max(1, r["full_bytes"]))
        for b in budgets
    )
    seconds = (
        _at(ran, *case, lambda r: r["first_cpu_s"])
        for case in (("static", 0.5), ("static", None), ("dynamic", 0.5))
    )
    drawn = [r["replayed"] for r in ours if r["budget"] == min(budgets)]
    return [
        "yes" if found.get("random") else "no",
        " / ".join(_graphs(ours, shapes) for shapes in ("static", "dynamic")),
        *("–" if share is None else f"{share:.2f}" for share in saved),
        str(max(drawn, default=0)),
        *("–" if took is None else f"{took:.1f}" for took in seconds),
        _worst(ours),
        _worst(theirs),
        _verdict(rows),
    ]


def _at(
    ran: Sequence[Row], shapes: str, budget: float | None, figure: Callable[[Row], float]
) -> float | None:
    """A figure of one case; None where it did not run."""
    found = (figure(r) for r in ran if (r["shapes"], r["budget"]) == (shapes, budget))
    return next(found, None)


def mine(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["budget"] is not None]


def _graphs(ran: Sequence[Row], shapes: str) -> str:
    rows = [r for r in ran if r["shapes"] == shapes]
    if not rows:
        return "–"
    first = rows[0]
    later = f"+{first['again']}" if first["again"] else ""
    return f"{first['plans']}{later}"


def _worst(rows: Sequence[Row]) -> str:
    if not rows:
        return "–"
    if any(r["gradient_error"] is None for r in rows):
        return "∞"
    return f"{max(r['gradient_error'] for r in rows):.1e}"


def _verdict(rows: Sequence[Row]) -> str:
    ours = mine(rows)
    wrong, failed = sum(r["wrong"] for r in ours), sum(r["failed"] is not None for r in ours)
    if not wrong and not failed:
        return "works"
    parts = [f"{n} {what}" for n, what in ((wrong, "wrong"), (failed, "failed")) if n]
    alone = "" if any(_is_ours_alone(r, rows) for r in ours) else ", as without us"
    return f"[red]{' and '.join(parts)} of {len(ours)}{alone}[/red]"


def _is_ours_alone(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a case of ours is bad where PyTorch without us is not known to be."""
    if not row["wrong"] and row["failed"] is None:
        return False
    beside = [r for r in rows if r["budget"] is None and r["shapes"] == row["shapes"]]
    return not any(r["failed"] is not None or r["wrong"] for r in beside)


def ours_alone(types: Types) -> list[tuple[str, Row]]:
    """The cases that are wrong or fail with us only."""
    return [
        (name, row)
        for name, _, rows in _by_lowering(types)
        for row in mine(rows)
        if _is_ours_alone(row, rows)
    ]


def failures(types: Types) -> Iterator[str]:
    """A line for every case that failed or is wrong, with PyTorch without us on the same."""
    for name, lower, rows in _by_lowering(types):
        for row in mine(rows):
            if row["failed"] is None and not row["wrong"]:
                continue
            beside = [r for r in rows if r["budget"] is None and r["shapes"] == row["shapes"]]
            theirs = "not run" if not beside else _state(beside[0])
            yield (
                f"{name}, {lower}, {row['shapes']}, budget {row['budget']}: {_state(row)} "
                f"(without us: {theirs})"
            )


def _state(row: Row) -> str:
    if row["failed"] is not None:
        return f"failed with {row['failed']}"
    if row["wrong"]:
        errors = (row["gradient_error"], row["parameter_error"], row["output_error"])
        named = "gradients {}, one parameter {}, outputs {}".format(
            *("∞" if e is None else f"{e:.1e}" for e in errors)
        )
        bits = ", other bits than at budget 1" if row["same_bits"] is False else ""
        state = "" if row["same_state"] else ", generator or buffers left otherwise"
        return f"wrong by {named}{bits}{state}"
    return "works"


def _by_lowering(types: Types) -> Iterator[tuple[str, str, list[Row]]]:
    for name, lowerings in types.items():
        for lower, found in lowerings.items():
            yield name, lower, found["rows"]


def summary(types: Types) -> str:
    """How many types and cases work."""
    parts = []
    for lower in LIMIT:
        found = [rows for _, of, rows in _by_lowering(types) if of == lower]
        if not found:
            continue
        good = [[not r["wrong"] and r["failed"] is None for r in mine(rows)] for rows in found]
        parts.append(
            f"{lower}: {sum(map(all, good))} of {len(good)} types work in every case, "
            f"{sum(map(sum, good))} of {sum(map(len, good))} cases"
        )
    return "; ".join(parts)

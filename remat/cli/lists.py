"""The commands that list solvers, passes and cost models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import click

from remat.cli.commands import echo_json, json_option, main

Row = dict[str, Any]


@main.command()
@json_option
def solvers(as_json: bool) -> None:
    """List the solvers; for a solver that cannot run here, also the reason."""
    from remat.plugins.registry import registry
    from remat.solvers.base import KINDS, unavailable

    rows: list[Row] = []
    for name, kind in registry().solvers.items():
        reason = unavailable(kind)
        rows.append(
            {
                "name": name,
                "available": reason is None,
                "reason": reason,
                "exact": kind.exact,
                "deterministic": kind.deterministic,
                "solves": [k.kind for k in KINDS if k.kind in kind.solves],
                "summary": kind.summary,
            }
        )
    if as_json:
        refused = [str(problem) for problem in registry().problems]
        echo_json({"solvers": rows, "refused": refused})
        return
    shown = [r | {"available": r["available"] or f"no: {r['reason']}"} for r in rows]
    columns = {
        "solver": "name",
        "available": "available",
        "exact": "exact",
        "deterministic": "deterministic",
        "what it does": "summary",
    }
    _show(columns, shown)


@main.command()
@click.option("--pipeline", is_flag=True, help="print the default pipeline of plans")
@json_option
def passes(pipeline: bool, as_json: bool) -> None:
    """List the passes and analyses, with the options that a pipeline can give them."""
    from remat.plugins.registry import registry

    if pipeline:
        from remat.api import default_pipeline

        text = str(default_pipeline())
        click.echo(json.dumps({"pipeline": text}) if as_json else text)
        return
    # `not_after`: dict from each pass after which this pass must not run to the reason. `optional`: whether results
    # stay right if this pass is left out.
    found: list[Row] = [
        {
            "name": name,
            "stage": kind.stage.name.lower(),
            "options": _options(kind),
            "not_after": dict(kind.not_after),
            "optional": kind.optional,
            "summary": kind.summary,
        }
        for name, kind in registry().passes.items()
    ]
    analyses: list[Row] = [
        {
            "name": name,
            "options": _options(kind),
            "summary": kind.summary,
        }
        for name, kind in registry().analyses.items()
    ]
    if as_json:
        echo_json({"passes": found, "analyses": analyses})
        return
    columns = {
        "pass": "name",
        "stage": "stage",
        "options": "options",
        "not after": "not_after",
        "what it does": "summary",
    }
    _show(columns, [row | {"not_after": "\n".join(row["not_after"])} for row in found])
    click.echo()
    columns = {"analysis": "name", "options": "options", "what it tells": "summary"}
    _show(columns, analyses)


@main.command()
@json_option
def costs(as_json: bool) -> None:
    """List the cost models, and the devices for which each cost model has data."""
    from remat.plugins.registry import registry

    rows: list[Row] = [
        {
            "name": name,
            "unit": kind.unit,
            "summary": kind.summary,
            "devices": dict(kind.arguments()),
        }
        for name, kind in registry().cost_models.items()
    ]
    if as_json:
        echo_json({"costs": rows})
        return
    columns = {
        "cost model": "name",
        "unit": "unit",
        "what it counts": "summary",
        "devices": "devices",
    }
    named = [
        row
        | {
            "devices": "\n".join(
                f"{row['name']}:{d}  {label}" for d, label in row["devices"].items()
            )
        }
        for row in rows
    ]
    _show(columns, named)


def _options(kind: Any) -> dict[str, str]:
    """Return a dict from each option of a pass or analysis to its default value as text.

    The text is empty if the option has no default, or if the text of a pipeline cannot express the default.
    """
    from remat.passes.core.pipeline_text import NESTED, write_option

    found: dict[str, str] = {}
    for f in dataclasses.fields(kind):
        if f.name == NESTED:
            continue
        text = "" if f.default is dataclasses.MISSING else write_option(f.default)
        if text == repr(f.default) and dataclasses.is_dataclass(f.default):
            text = ""  # the text of a pipeline cannot express this default
        found[f.name.replace("_", "-")] = text
    return found


def _show(columns: Mapping[str, str], rows: list[Row]) -> None:
    """Print a table whose first column stays on one line and whose other columns wrap.

    Args:
        columns: dict from the heading of each column to the key of the column's cells in a row.
        rows: one dictionary of cells per row. Rows with a non-empty ``reason`` are dimmed.
    """
    from remat.cli import tables

    table = tables.new_table()
    for k, name in enumerate(columns):
        table.add_column(name, no_wrap=k == 0, overflow="ellipsis" if k == 0 else "fold")
    for row in rows:
        cells = [_cell(row[key]) for key in columns.values()]
        table.add_row(*cells, style="dim" if row.get("reason") else None)
    tables.show(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{name}={default}" for name, default in value.items())
    return str(value)

"""The commands that list solvers, passes and cost models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from remat.cli.commands import json_option, main
from remat.cli.output import echo_json

Row = dict[str, Any]


@main.command()
@json_option
def solvers() -> None:
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
    refused = [str(problem) for problem in registry().problems]
    if not echo_json({"solvers": rows, "refused": refused}):
        shown = [r | {"available": r["available"] or f"no: {r['reason']}"} for r in rows]
        keys = ("name", "available", "exact", "deterministic", "summary")
        _show(shown, keys, name="solver", summary="what it does")


@main.command()
@click.option("--pipeline", is_flag=True, help="print the default pipeline of plans")
@json_option
def passes(pipeline: bool) -> None:
    """List the passes and analyses, with the options that a pipeline can give them."""
    from remat.plugins.registry import registry

    if pipeline:
        from remat.api import default_pipeline

        text = str(default_pipeline())
        if not echo_json({"pipeline": text}):
            click.echo(text)
        return
    rows: list[Row] = [
        {
            "name": name,
            "stage": kind.stage.name.lower(),
            "options": _options(kind),
            # Passes after which the listed pass must not run, each with the reason.
            "not_after": dict(kind.not_after),
            # Whether results stay right if the listed pass is left out.
            "optional": kind.optional,
            "summary": _summary(kind),
        }
        for name, kind in registry().passes.items()
    ]
    analyses: list[Row] = [
        {"name": name, "options": _options(kind), "summary": _summary(kind)}
        for name, kind in registry().analyses.items()
    ]
    if echo_json({"passes": rows, "analyses": analyses}):
        return
    shown = [row | {"not_after": "\n".join(row["not_after"])} for row in rows]
    keys = ("name", "stage", "options", "not_after", "summary")
    _show(shown, keys, name="pass", not_after="not after", summary="what it does")
    click.echo()
    _show(analyses, ("name", "options", "summary"), name="analysis", summary="what it tells")


@main.command()
@json_option
def costs() -> None:
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
    if echo_json({"costs": rows}):
        return
    _show(rows, ("name", "unit", "summary"), name="cost model", summary="what it counts")
    devices = [
        {"name": f"{row['name']}:{device}", "device": label}
        for row in rows
        for device, label in row["devices"].items()
    ]
    click.echo()
    _show(devices, ("name", "device"), name="cost model")


def _summary(kind: type) -> str:
    """Return the first line of a class's docstring, without backquotes."""
    return (kind.__doc__ or "").strip().partition("\n")[0].replace("`", "")


def _options(kind: Any) -> dict[str, str]:
    """Return a dict from each option of a pass or analysis to its default as text; empty if no text expresses it."""
    from remat.passes.core.pipeline_text import NESTED, write_option

    options: dict[str, str] = {}
    for f in dataclasses.fields(kind):
        if f.name == NESTED:
            continue
        text = "" if f.default is dataclasses.MISSING else write_option(f.default)
        if dataclasses.is_dataclass(f.default) and str(f.default) == repr(f.default):
            text = ""  # the text of a pipeline cannot express this default
        options[f.name.replace("_", "-")] = text
    return options


def _show(rows: list[Row], keys: Sequence[str], **headings: str) -> None:
    """Print a table with a column for each key; dim rows with a reason. A column's heading is its key, unless given."""
    from remat.cli import tables

    table = tables.new_table("", [headings.get(key, key) for key in keys], left=range(len(keys)))
    table.columns[0].no_wrap = True
    for row in rows:
        cells = [_cell(row[key]) for key in keys]
        table.add_row(*cells, style="dim" if row.get("reason") else None)
    tables.show(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{name}={default}" for name, default in value.items())
    return str(value)

"""The commands that list solvers, passes and cost models."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from remat.cli.commands import json_option, main
from remat.cli.output import as_json

Row = dict[str, Any]


@main.command()
@json_option
def solvers() -> None:
    """List the solvers; for a solver that cannot run here, also the reason."""
    from remat.cli.tables import show_rows
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
    if not as_json({"solvers": rows, "refused": refused}):
        shown = [r | {"available": r["available"] or f"no: {r['reason']}"} for r in rows]
        show_rows(shown, ("name", "available", "exact", "deterministic", "summary"))


@main.command()
@click.option("--pipeline", is_flag=True, help="print the default pipeline of plans")
@json_option
def passes(pipeline: bool) -> None:
    """List the passes and analyses, with the options that a pipeline can give them."""
    from remat.cli.tables import show_rows
    from remat.plugins.registry import registry

    if pipeline:
        from remat.api import default_pipeline

        text = str(default_pipeline())
        if not as_json({"pipeline": text}):
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
    if not as_json({"passes": rows, "analyses": analyses}):
        shown = [row | {"not_after": "\n".join(row["not_after"])} for row in rows]
        show_rows(shown, ("name", "stage", "options", "not_after", "summary"))
        click.echo("\nanalyses")
        show_rows(analyses)


@main.command()
@json_option
def costs() -> None:
    """List the cost models, and the devices for which each cost model has data."""
    from remat.cli.tables import show_rows
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
    if not as_json({"costs": rows}):
        show_rows(rows, ("name", "unit", "summary"))
        click.echo()
        show_rows(
            [
                {"name": f"{row['name']}:{device}", "device": label}
                for row in rows
                for device, label in row["devices"].items()
            ]
        )


def _summary(kind: type) -> str:
    """Return the first line of a class's docstring, without backquotes."""
    return (kind.__doc__ or "").strip().partition("\n")[0].replace("`", "")


def _options(kind: Any) -> dict[str, str]:
    """Return a dict from each option of a pass or analysis to its default as text (empty if text cannot express it)."""
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

"""What there is to choose from, as plain data, each row a table's and a JSON object: solvers, passes, cost models."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat.plugins.registry import registry

Row = dict[str, Any]


def solver_rows() -> list[Row]:
    """The registered solvers; ``reason`` says why one cannot run here, None if it can."""
    from remat.solvers.base import KINDS, unavailable

    rows = []
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
    return rows


def pass_rows() -> list[Row]:
    """The registered passes, with the defaults of their options as a pipeline would write them.

    ``not_after`` names the passes that one must not follow, each with the reason; ``optional`` says
    whether a pipeline is right without it.
    """
    return [
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


def analysis_rows() -> list[Row]:
    """The registered analyses; ``of`` says what one is about."""
    return [
        {
            "name": name,
            "of": "forward and backward" if kind.of_halves else "joint graph",
            "options": _options(kind),
            "summary": kind.summary,
        }
        for name, kind in registry().analyses.items()
    ]


def cost_rows() -> list[Row]:
    """The registered cost models, with what can follow their names, devices for the most part."""
    return [
        {
            "name": name,
            "unit": kind.unit,
            "summary": kind.summary,
            "devices": dict(kind.arguments()),
        }
        for name, kind in registry().cost_models.items()
    ]


def _options(kind: Any) -> dict[str, str]:
    """The options of a pass or an analysis with their defaults; those without one are empty."""
    from remat.passes.core.pipeline_text import NESTED, write_option

    found: dict[str, str] = {}
    for f in dataclasses.fields(kind):
        if f.name == NESTED:
            continue
        text = "" if f.default is dataclasses.MISSING else write_option(f.default)
        if text == repr(f.default) and dataclasses.is_dataclass(f.default):
            text = ""  # a pipeline cannot write it
        found[f.name.replace("_", "-")] = text
    return found

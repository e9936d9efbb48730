"""What there is to choose from, as plain data: solvers, passes, cost models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from remat.plugins.registry import registry


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLine:
    """A registered solver; ``reason`` says why it cannot run here, None if it can."""

    name: str
    available: bool
    reason: str | None
    exact: bool
    deterministic: bool
    solves: tuple[str, ...]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLine:
    """A registered pass, with the defaults of its options as a pipeline would write them.

    ``not_after`` names the passes that it must not follow, each with the reason; ``optional`` says
    whether a pipeline is right without it.
    """

    name: str
    stage: str
    options: dict[str, str]
    not_after: dict[str, str]
    optional: bool
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisLine:
    """A registered analysis; ``of`` says what it is about."""

    name: str
    of: str
    options: dict[str, str]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """A registered cost model, with what can follow its name, devices for the most part."""

    name: str
    unit: str
    summary: str
    devices: dict[str, str]


def solver_lines() -> list[SolverLine]:
    from remat.solvers.base import unavailable

    lines = []
    for name, kind in registry().solvers.items():
        reason = unavailable(kind)
        problems = (("knapsack", kind.knapsack), ("graph", kind.graph))
        lines.append(
            SolverLine(
                name=name,
                available=reason is None,
                reason=reason,
                exact=kind.exact,
                deterministic=kind.deterministic,
                solves=tuple(label for label, able in problems if able),
                summary=kind.summary,
            )
        )
    return lines


def pass_lines() -> list[PassLine]:
    return [
        PassLine(
            name=name,
            stage=kind.stage.name.lower(),
            options=_options(kind),
            not_after=dict(kind.not_after),
            optional=kind.optional,
            summary=kind.summary,
        )
        for name, kind in registry().passes.items()
    ]


def analysis_lines() -> list[AnalysisLine]:
    return [
        AnalysisLine(
            name=name,
            of="forward and backward" if kind.of_halves else "joint graph",
            options=_options(kind),
            summary=kind.summary,
        )
        for name, kind in registry().analyses.items()
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


def cost_lines() -> list[CostLine]:
    return [
        CostLine(
            name=name,
            unit=kind.unit,
            summary=kind.summary,
            devices=dict(kind.arguments()),
        )
        for name, kind in registry().cost_models.items()
    ]

"""What there is to choose from, as plain data: solvers, passes, cost models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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
    """A registered pass, with the defaults of its options as a pipeline would write them."""

    name: str
    stage: str
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
    from remat.passes.pipeline_text import NESTED, write_option

    return [
        PassLine(
            name=name,
            stage=kind.stage.name.lower(),
            options={
                f.name.replace("_", "-"): write_option(f.default)
                for f in dataclasses.fields(kind)  # type: ignore[arg-type]
                if f.name != NESTED
            },
            summary=kind.summary,
        )
        for name, kind in registry().passes.items()
    ]


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

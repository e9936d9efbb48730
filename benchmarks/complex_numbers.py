"""Are gradients of complex numbers those of eager PyTorch at every budget?

``complex-numbers``: the 20 programs of `tests.complex_programs`. ``off`` is the norm of the difference of the loss and both
gradients together, relative to their norm in eager PyTorch. The side ``pytorch inductor`` is ``torch.compile`` without remat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.experiment import Case, Experiment, Row, grid
from tests.complex_programs import PROGRAMS, Program, gradients
from tests.model_type_steps import LIMIT, reason

BUDGETS = (1, 0.5, 0, "peak:0.5")
SIDES = ("remat eager", "remat inductor")


def compiled(program: Program, case: Case) -> Any:
    if case.budget is None:
        return torch.compile(program)
    options = {"budget": case.budget, "lower": case.side.split()[1]}
    return torch.compile(program, backend="remat", options=options)


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    expected = torch.cat([v.flatten() for v in gradients(PROGRAMS[name])])
    for case in cases:
        torch._dynamo.reset()
        try:
            found = gradients(compiled(PROGRAMS[name], case))
        except Exception as error:  # a step that raises is a result here
            yield case.row(off=None, wrong=True, failed=reason(error))
            continue
        off = float(torch.cat([v.flatten() for v in found]).dist(expected) / expected.norm())
        yield case.row(off=off, wrong=not off <= LIMIT[case.side.split()[1]], failed=None)


def summarise(rows: list[Row]) -> Row:
    wrong = [
        f"{r['workload']}, {r['side']}, budget {r['budget']}: {r['failed'] or r['off']}"
        for r in rows
        if r["wrong"]
    ]
    return {
        "programs": len({r["workload"] for r in rows}),
        "steps": sum(r["budget"] is not None for r in rows),
        "wrong": [text for text in wrong if ", remat " in text],
        "wrong_without_remat": [text for text in wrong if ", remat " not in text],
    }


EXPERIMENTS = {
    "complex-numbers": Experiment(
        about="gradients of 20 programs of complex numbers, beside eager PyTorch's",
        cases=(*grid(PROGRAMS, (None,), ("pytorch inductor",)), *grid(PROGRAMS, BUDGETS, SIDES)),
        quick=grid(PROGRAMS, (1, 0), SIDES[:1]),
        measure=measure,
        summarise=summarise,
        missed=lambda summary: summary["wrong"],
    )
}

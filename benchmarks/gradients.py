"""How far gradients move from eager PyTorch's under a memory budget: ours and PyTorch's partitioner.

    python -m benchmarks.gradients [--quick] [--models llama,gpt2] [--lower eager,inductor]

Every model of `benchmarks.models`, those with custom operators too, at every budget: ours with every solver that runs here, PyTorch's
with its default solver, each with the graphs run as they are and through Inductor (with
``fallback_random``, so that eager's random numbers are drawn). The figure is the norm of the
difference of all gradients together, relative to their norm under eager PyTorch; the worst over
solvers and budgets is shown. Solvers that decide alike are compiled once. Steps that refill their
inputs before backward (`benchmarks.refilled`) are planned with ``reread_inputs=False``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from benchmarks.machine import header
from benchmarks.models import CUSTOM, ZOO, Outcome, Step, build
from benchmarks.refilled import CASES as REFILLED

BUDGETS = (0, 0.05, 0.2, 0.5, 0.8, 1)
#: Differences above these are wrong numbers, not another order of summation.
LIMIT = {"eager": 1e-5, "inductor": 1e-4}
RESULTS = Path(__file__).parent / "results" / "gradients.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model under one partitioner and one lowering.

    Attributes:
        model: name in the zoo.
        lower: ``"eager"`` or ``"inductor"``.
        partitioner: ``"remat"`` or ``"pytorch"``.
        worst: greatest relative difference of the gradients from eager PyTorch's.
        worst_at: where that was.
        wrong_at: budgets (and solvers) at which it is above the limit of the lowering.
        failed: what raised, by budget.
        steps: steps compiled and run.
        covered: pairs of solver and budget that they stand for.
        same_as_full_budget: whether outputs, gradients, buffers and random state were those of
            budget 1 bit for bit, at every budget.
        elapsed_s: seconds for all of it.
    """

    model: str
    lower: str
    partitioner: str
    worst: float
    worst_at: str
    wrong_at: tuple[str, ...]
    failed: dict[str, str]
    steps: int
    covered: int
    same_as_full_budget: bool
    elapsed_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--quick", action="store_true", help="budgets 0.05, 0.5 and 1; no Inductor")
    parser.add_argument(
        "--models",
        default=",".join([*ZOO, *CUSTOM, *REFILLED]),
        help="names, separated by commas",
    )
    parser.add_argument("--lower", default=None, help="eager, inductor, or both (default)")
    parser.add_argument("--output", type=Path, default=None, help=f"JSON file (default {RESULTS})")
    given = parser.parse_args()
    budgets = (0.05, 0.5, 1) if given.quick else BUDGETS
    lowerings = (given.lower or ("eager" if given.quick else "eager,inductor")).split(",")
    output = given.output or (RESULTS.with_suffix(".quick.json") if given.quick else RESULTS)
    rows: list[Row] = []
    console = Console(width=None if sys.stdout.isatty() else 110)
    for lower in lowerings:
        for name in given.models.split(","):
            for measure in (ours, theirs):
                with console.status(f"{name}, {lower}, {measure.__name__}"):
                    rows.append(measure(name, lower, budgets))
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report(rows, budgets), indent=2) + "\n")
    for lower in lowerings:
        console.print(table(rows, lower, budgets))
    console.print(f"written to {output}")
    if any(r.wrong_at or r.failed for r in rows if r.partitioner == "remat"):
        raise SystemExit(1)


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def ours(name: str, lower: str, budgets: Sequence[float]) -> Row:
    """Every solver at every budget; each distinct decision is compiled and run once."""
    from torch._inductor import config as inductor

    step = _step(name)
    with inductor.patch(fallback_random=lower == "inductor"):
        joint = remat.capture(step.model, step.args, step.kwargs, lower=lower)
    plans: dict[object, tuple[list[str], remat.Plan]] = {}
    for solver in remat.solver_names():
        for budget in budgets:
            plan = remat.plan(joint, budget, solver, reread_inputs=name not in REFILLED)
            plans.setdefault(plan.decision, ([], plan))[0].append(f"{solver} at {budget}")
    options: dict[str, Any] = {"lower": lower}
    if lower == "inductor":
        options["fallback_random"] = True

    def runs() -> Iterator[tuple[list[str], Callable[[], Outcome]]]:
        for labels, plan in plans.values():
            how = {"backend": "remat", "options": {**options, "plan": plan}}
            yield labels, lambda how=how: _compiled(step, **how)  # type: ignore[misc]

    return _row(step, name, lower, "remat", runs())


def theirs(name: str, lower: str, budgets: Sequence[float]) -> Row:
    """PyTorch's partitioner at the same budgets, with its default solver."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    backend: Any = "inductor"
    if lower == "eager":
        backend = aot_autograd(
            fw_compiler=lambda module, _: make_boxed_func(module.forward),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
    step = _step(name)

    def at(budget: float) -> Outcome:
        with (
            functorch.patch(activation_memory_budget=budget, enable_autograd_cache=False),
            inductor.patch(fallback_random=True),
        ):
            return _compiled(step, backend=backend)

    def runs() -> Iterator[tuple[list[str], Callable[[], Outcome]]]:
        for budget in budgets:
            yield [f"{budget}"], lambda b=budget: at(b)  # type: ignore[misc]

    return _row(step, name, lower, "pytorch", runs())


def _step(name: str) -> Step:
    """A model of the zoo, or a step whose inputs are refilled, from the same numbers."""
    if name not in REFILLED:
        return build(name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return REFILLED[name]()


def _compiled(step: Step, **how: Any) -> Outcome:
    torch._dynamo.reset()
    return step.train(torch.compile(step.model, **how))


def _row(
    step: Step,
    name: str,
    lower: str,
    partitioner: str,
    runs: Iterator[tuple[list[str], Callable[[], Outcome]]],
) -> Row:
    reference = step.train()
    start = time.perf_counter()
    worst, worst_at, steps, covered = 0.0, "", 0, 0
    wrong: list[str] = []
    failed: dict[str, str] = {}
    outcomes: list[tuple[list[str], Outcome]] = []
    for labels, run in runs:
        steps, covered = steps + 1, covered + len(labels)
        try:
            outcome = run()
        except Exception as error:  # a partitioner that raises is a result here
            inner = getattr(error, "inner_exception", error)
            failed[labels[0]] = f"{type(inner).__name__}: {str(inner).splitlines()[0][:160]}"
            continue
        outcomes.append((labels, outcome))
        distance = outcome.gradient_distance(reference)
        if distance > worst or not worst_at:
            worst, worst_at = distance, labels[0]
        if distance > LIMIT[lower]:
            wrong += labels
    full = next((o for labels, o in outcomes if any(_is_full(label) for label in labels)), None)
    return Row(
        model=name,
        lower=lower,
        partitioner=partitioner,
        worst=worst,
        worst_at=worst_at,
        wrong_at=tuple(wrong),
        failed=failed,
        steps=steps,
        covered=covered,
        same_as_full_budget=full is not None
        and not failed
        and all(not o.differs_from(full) for _, o in outcomes),
        elapsed_s=time.perf_counter() - start,
    )


def _is_full(label: str) -> bool:
    return label.rpartition(" ")[2] == "1"


def table(rows: Sequence[Row], lower: str, budgets: Sequence[float]) -> Table:
    """One line per model: ours beside PyTorch's."""
    shown = Table(
        title=f"Worst relative difference of gradients from eager PyTorch, budgets "
        f"{', '.join(map(str, budgets))}; lowering: {lower}; wrong above {LIMIT[lower]:g}",
        title_justify="left",
    )
    for head in (
        "model",
        "ours",
        "solver × budget",
        "bits as at 1",
        f"PyTorch {torch.__version__}",
        "wrong at",
    ):
        left = head in ("model", "wrong at")
        shown.add_column(head, justify="left" if left else "right", no_wrap=head == "model")
    for mine in rows:
        if mine.lower != lower or mine.partitioner != "remat":
            continue
        other = next(
            r for r in rows if (r.model, r.lower, r.partitioner) == (mine.model, lower, "pytorch")
        )
        where = [*other.wrong_at, *(f"{b}: {e.split(':')[0]}" for b, e in other.failed.items())]
        shown.add_row(
            mine.model,
            _format(mine),
            str(mine.covered),
            "yes" if mine.same_as_full_budget else "no",
            _format(other),
            ", ".join(where) or "–",
        )
    return shown


def _format(row: Row) -> str:
    text = "∞" if math.isinf(row.worst) else f"{row.worst:.1e}"
    bad = row.wrong_at or (row.failed and row.partitioner == "remat")
    return f"[red]{text}[/red]" if bad else text


def report(rows: Sequence[Row], budgets: Sequence[float]) -> dict[str, Any]:
    return {
        **header("gradients"),
        "budgets": list(budgets),
        "solvers": list(remat.solver_names()),
        "limits": LIMIT,
        # JSON knows no infinity.
        "rows": [asdict(r) | {"worst": r.worst if math.isfinite(r.worst) else None} for r in rows],
    }


if __name__ == "__main__":
    main()

"""Do gradients stay those of eager PyTorch at every budget? Under remat, and under PyTorch's own partitioner.

``gradients``: every model of `tests.models`, those with custom operators, and those whose inputs are overwritten before
backward (planned with ``reread_inputs=False``). remat plans with every solver at every budget; solvers that decide alike
are compiled once. The figure is the norm of the difference of all gradients together, relative to their norm under eager
PyTorch; the worst over solvers and budgets counts. Inductor draws eager's random numbers (``fallback_random``).

``model-types``: types of `transformers` models train two steps, with static and dynamic shapes; outputs, all gradients,
buffers and the state of the generator are compared with eager PyTorch's. Under the eager lowering, all budgets must agree
bit for bit. A case that raises is a result. A case at budget None is PyTorch without remat. It runs under the eager lowering
with static shapes, and elsewhere if remat raised, was wrong, or compiled anew for the second batch.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from tests.model_type_steps import LIMIT, Bench, reason
from tests.model_type_steps import Case as TypeCase
from tests.model_types import RECIPES, make
from tests.models import CUSTOM, ZOO, Outcome, Step, build
from tests.refilled import CASES as REFILLED

BUDGETS = (0, 0.05, 0.2, 0.5, 0.8, 1)
MODELS = (*ZOO, *CUSTOM, *REFILLED)
SIDES = ("remat eager", "pytorch eager", "remat inductor", "pytorch inductor")


@functools.lru_cache(maxsize=1)
def step_of(name: str) -> Step:
    """A step by its name; all start from the same numbers."""
    if name not in REFILLED:
        return build(name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return REFILLED[name]()


def compiled(step: Step, **how: Any) -> Outcome:
    torch._dynamo.reset()
    return step.train(torch.compile(step.model, **how))


#: A step to run, with the labels of what it stands for.
Run = tuple[list[str], Callable[[], Outcome]]


def runs_of_remat(name: str, lower: str, budgets: Sequence[float]) -> Iterator[Run]:
    """Every solver at every budget; each distinct decision is compiled and run once."""
    from torch._inductor import config as inductor

    step = step_of(name)
    with inductor.patch(fallback_random=lower == "inductor"):
        joint = remat.capture(step.model, step.args, step.kwargs, lower=lower)  # type: ignore[arg-type]
    plans: dict[object, tuple[list[str], remat.Plan]] = {}
    for solver in remat.solver_names():
        for budget in budgets:
            plan = remat.plan(joint, budget, solver, reread_inputs=name not in REFILLED)
            plans.setdefault(plan.decision, ([], plan))[0].append(f"{solver} at {budget}")
    options = {"lower": lower, **({"fallback_random": True} if lower == "inductor" else {})}
    for labels, plan in plans.values():
        how = {"backend": "remat", "options": {**options, "plan": plan}}
        yield labels, functools.partial(compiled, step, **how)


def runs_of_pytorch(name: str, lower: str, budgets: Sequence[float]) -> Iterator[Run]:
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

    def at(budget: float) -> Outcome:
        with (
            functorch.patch(activation_memory_budget=budget, enable_autograd_cache=False),
            inductor.patch(fallback_random=True),
        ):
            return compiled(step_of(name), backend=backend)

    for budget in budgets:
        yield [f"{budget}"], functools.partial(at, budget)


def measure_gradients(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    budgets = (0.05, 1) if quick else BUDGETS
    for case in cases:
        who, lower = case.side.split()
        runs = (runs_of_remat if who == "remat" else runs_of_pytorch)(name, lower, budgets)
        yield case.row(**distances(step_of(name), lower, runs))


def distances(step: Step, lower: str, runs: Iterable[Run]) -> Row:
    """How far the gradients of some runs are from eager PyTorch's.

    Returns:
        The worst difference, and where it was; the labels of the runs above the limit; what raised, by label; how many
        steps ran, and for how many labels they stand.
    """
    reference = step.train()
    start = time.perf_counter()
    covered, wrong, failed = 0, [], {}
    found: list[tuple[float, str]] = []
    for labels, run in runs:
        covered += len(labels)
        try:
            distance = run().gradient_distance(reference)
        except Exception as error:  # a partitioner that raises is a result here
            failed[labels[0]] = reason(error)
            continue
        found.append((distance, labels[0]))
        if distance > LIMIT[lower]:
            wrong += labels
    worst, worst_at = max(found, key=lambda pair: pair[0], default=(0.0, ""))
    return {
        "worst": worst if math.isfinite(worst) else None,  # JSON knows no infinity
        "worst_at": worst_at,
        "wrong_at": wrong,
        "failed": failed,
        "steps": len(found) + len(failed),
        "covered": covered,
        "elapsed_s": time.perf_counter() - start,
    }


def summarise_gradients(rows: list[Row]) -> Row:
    ours = [row for row in rows if row["side"].startswith("remat")]
    return {
        "budgets": list(BUDGETS),
        "solvers": list(remat.solver_names()),
        "limits": LIMIT,
        "wrong": [f"{r['workload']}, {r['side']}" for r in ours if r["wrong_at"] or r["failed"]],
    }


def measure_types(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    """Two steps of a model type, by each lowering that the cases name."""
    from torch._inductor.utils import fresh_cache

    built = make(name)
    bench = Bench(built)
    for lower in ("eager", "inductor"):
        own = [case for case in cases if case.side.split()[1] == lower]
        if not own:
            continue
        start = time.perf_counter()
        warm_up(lower)
        rows = []
        for shapes in ("static",) if quick else ("static", "dynamic"):
            bad = False
            for case in own:
                if case.budget is None and not bad and (lower, shapes) != ("eager", "static"):
                    continue
                with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=False):
                    result = bench.run(TypeCase(lower=lower, shapes=shapes, budget=case.budget))
                bad = bad or result.wrong or result.failed is not None or result.again > 0
                rows.append(case.row(**asdict(result), wrong=result.wrong))
        yield Case(workload=name, side=f"model {lower}").row(
            title=built.title,
            parameters=sum(p.numel() for p in built.model.parameters()),
            random=bench.is_random(),
            elapsed_s=round(time.perf_counter() - start, 1),
        )
        yield from rows


def warm_up(lower: str) -> None:
    """Compiles something small, so that no case pays for imports and for precompiled headers."""
    step = torch.compile(torch.nn.Linear(8, 8), backend="remat", options={"lower": lower})
    step(torch.ones(8, 8)).sin().sum().backward()


def summarise_types(rows: list[Row]) -> Row:
    """Counts of cases, and those that are wrong or fail under remat alone."""
    measured = [row for row in rows if not row["side"].startswith("model")]
    ours = [row for row in measured if row["budget"] is not None]
    bad = [row for row in measured if row["wrong"] or row["failed"] is not None]

    def kind(row: Row) -> tuple[str, str, str]:
        return row["workload"], row["side"].split()[1], row["shapes"]

    without = {kind(row) for row in bad if row["budget"] is None}
    return {
        "times": "first_cpu_s: processor seconds, compilers included; the others: wall seconds",
        "limits": LIMIT,
        "cases": len(ours),
        "wrong_or_failed": sum(row["budget"] is not None for row in bad),
        "under_remat_alone": [
            f"{r['workload']}, {r['side']}, {r['shapes']}, budget {r['budget']}: "
            f"{r['failed'] or 'wrong'}"
            for r in bad
            if r["budget"] is not None and kind(r) not in without
        ],
    }


EXPERIMENTS = {
    "gradients": Experiment(
        about="how far gradients move from eager PyTorch's under a budget, by every solver",
        cases=grid(MODELS, sides=SIDES),
        quick=grid(("randn_like", "mutated_buffer", "custom_counting"), sides=SIDES[:2]),
        measure=measure_gradients,
        summarise=summarise_gradients,
        missed=lambda summary: summary["wrong"],
    ),
    "model-types": Experiment(
        about="two training steps of types of transformers models, beside eager PyTorch's",
        cases=(
            # Budget 1 comes first: the others must equal it.
            *grid(RECIPES, (1.0, 0.5, 0.2), ("remat eager",)),
            *grid(RECIPES, (None,), ("pytorch eager",)),
            *grid(RECIPES, (0.5,), ("remat inductor",)),
            *grid(RECIPES, (None,), ("pytorch inductor",)),
        ),
        quick=(
            *grid(("llama", "convnext"), (1.0, 0.5, 0.2), ("remat eager",)),
            *grid(("llama", "convnext"), (None,), ("pytorch eager",)),
        ),
        measure=measure_types,
        summarise=summarise_types,
        missed=lambda summary: summary["under_remat_alone"],
        # Kernels are compiled one after another by children of the process, so that it sees their time.
        environment={"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"},
    ),
}

"""Two training steps of a model type, compiled one way, beside the same steps of eager PyTorch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

import remat
from tests.model_types import Batch, Built
from tests.models import Outcome, Step

#: Differences above these are wrong numbers, not another order of summation.
LIMIT = {"eager": 1e-5, "inductor": 1e-4}
#: Learning rate of plain SGD between the steps.
RATE = 0.05
SEED = 7
#: Below this share of the norm of all gradients, a parameter's own is not a yardstick for itself.
FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to compile a model type.

    Attributes:
        lower: ``"eager"`` or ``"inductor"``.
        shapes: ``"static"``: both batches of one size; ``"dynamic"``: of different sizes.
        budget: ours; None for PyTorch without us.
    """

    lower: str
    shapes: str
    budget: float | None

    def options(self) -> dict[str, Any]:
        """What `torch.compile` is given."""
        how: dict[str, Any] = {"dynamic": self.shapes == "dynamic"}
        # Inductor draws eager's numbers, so that dropout can be compared.
        options = {"fallback_random": True} if self.lower == "inductor" else {}
        if self.budget is not None:
            options |= {"budget": self.budget, "lower": self.lower}
            return {**how, "backend": "remat", "options": options}
        if self.lower == "eager":
            return {**how, "backend": "aot_eager"}
        return {**how, "backend": "inductor", "options": options}

    def batches(self, built: Built) -> tuple[Batch, Batch]:
        return built.same if self.shapes == "static" else built.other


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one case.

    Attributes:
        lower: as in `Case`.
        shapes: as in `Case`.
        budget: as in `Case`.
        failed: what raised, in a line; None if nothing did.
        plans: joint graphs that were planned in the first step.
        plans_again: joint graphs that were planned in the second step.
        graphs: graphs that Dynamo compiled in the first step.
        again: graphs that it compiled in the second step.
        breaks: places at which it broke the graph.
        saved_bytes: that the plans of the first step save, together.
        full_bytes: that the runtime-optimal partition of the same graphs saves.
        least_bytes: the least that any plan of the same graphs saves.
        replayed: random operators that backward draws again from a saved state.
        first_s: seconds of the first step, compilation included.
        first_cpu_s: of all processors and of compilers that were started, in the same time.
        second_s: seconds of the second step; compilation included if ``again`` is not 0.
        gradient_error: of all gradients together, relative to their norm in eager PyTorch; the
            worse of both steps.
        parameter_error: the worst of any parameter's gradient, relative to its own norm.
        output_error: the worst of any output, the loss among them, relative to its norm.
        same_state: whether the generator and all buffers were left as eager PyTorch leaves them.
        same_bits: whether everything is as at budget 1, bit for bit; None where that is not known.
    """

    lower: str
    shapes: str
    budget: float | None
    failed: str | None = None
    plans: int = 0
    plans_again: int = 0
    graphs: int = 0
    again: int = 0
    breaks: int = 0
    saved_bytes: int = 0
    full_bytes: int = 0
    least_bytes: int = 0
    replayed: int = 0
    first_s: float = 0.0
    first_cpu_s: float = 0.0
    second_s: float = 0.0
    gradient_error: float | None = None
    parameter_error: float | None = None
    output_error: float | None = None
    same_state: bool = False
    same_bits: bool | None = None

    @property
    def wrong(self) -> bool:
        """Whether the numbers are others than eager PyTorch's."""
        if self.failed is not None:
            return False
        errors = (self.gradient_error, self.parameter_error, self.output_error)
        # The loosest of the three: a small gradient may cancel more digits than all together.
        limits = (LIMIT[self.lower], 10 * LIMIT[self.lower], LIMIT[self.lower])
        within = all(e is not None and e <= x for e, x in zip(errors, limits, strict=True))
        return not within or not self.same_state or self.same_bits is False


@dataclass(slots=True, kw_only=True, eq=False)
class Trained:
    """What two steps left behind, and what they took."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)
    plans: list[tuple[remat.Plan, ...]] = field(default_factory=list)


def train(
    built: Built, batches: Sequence[Batch], compiled: Callable[..., Any] | None = None
) -> Trained:
    """Trains from the initial weights: per batch forward, loss, backward, and a step of SGD."""
    done = Trained()
    for k, batch in enumerate(batches):
        step = Step(model=built.model, kwargs=batch, loss=lambda out: out.loss)
        graphs, plans = counters["stats"]["unique_graphs"], len(remat.plans())
        start, cpu = time.perf_counter(), cpu_seconds()
        done.outcomes.append(step.train(compiled, seed=SEED + k))
        torch.optim.SGD(built.model.parameters(), lr=RATE).step()
        done.seconds.append(time.perf_counter() - start)
        done.cpu_seconds.append(cpu_seconds() - cpu)
        done.compiled.append(counters["stats"]["unique_graphs"] - graphs)
        done.plans.append(remat.plans()[plans:])
    return done


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Bench:
    """One model type, with what eager PyTorch makes of it."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.initial = {k: v.clone() for k, v in built.model.state_dict().items()}
        self.eager = {s: self.reference(s) for s in ("static", "dynamic")}
        self.full: dict[tuple[str, str], list[Outcome]] = {}

    def reference(self, shapes: str) -> list[Outcome]:
        batches = self.built.same if shapes == "static" else self.built.other
        return self._train(batches).outcomes

    def is_random(self) -> bool:
        """Whether the loss depends on the seed."""
        step = Step(model=self.built.model, kwargs=self.built.same[0], loss=lambda out: out.loss)
        one, other = (step.train(seed=s).outputs["loss"] for s in (1, 2))
        return not torch.equal(one, other)

    def run(self, case: Case) -> Result:
        """Compiles the model as the case says and trains it; what raises is a result."""
        torch._dynamo.reset()
        counters.clear()
        facts: dict[str, Any] = {
            "lower": case.lower,
            "shapes": case.shapes,
            "budget": case.budget,
        }
        try:
            compiled = torch.compile(self.built.model, **case.options())
            trained = self._train(case.batches(self.built), compiled)
        except Exception as error:  # foreign code: whatever it raises is what came of it
            return Result(**facts, failed=reason(error))
        made, later = trained.plans
        if case.budget is not None and not made:
            return Result(**facts, failed="no graph ran on a plan of ours")
        at_full = self._at_full_budget(case, trained.outcomes)
        return Result(
            **facts,
            plans=len(made),
            plans_again=len(later),
            graphs=trained.compiled[0],
            again=trained.compiled[1],
            breaks=sum(counters["graph_break"].values()),
            saved_bytes=sum(p.saved_bytes for p in made),
            full_bytes=sum(p.full_bytes for p in made),
            least_bytes=sum(p.least_bytes for p in made),
            replayed=sum(replays(p.backward) for p in made),
            first_s=round(trained.seconds[0], 3),
            first_cpu_s=round(trained.cpu_seconds[0], 3),
            second_s=round(trained.seconds[1], 3),
            same_bits=None
            if at_full is None
            else not any(a.differs_from(b) for a, b in zip(trained.outcomes, at_full, strict=True)),
            **errors(trained.outcomes, self.eager[case.shapes]),
        )

    def _at_full_budget(self, case: Case, outcomes: list[Outcome]) -> list[Outcome] | None:
        """What budget 1 left behind; only the eager lowering owes it the same bits."""
        if case.budget is None or case.lower != "eager":
            return None
        if case.budget == 1:
            self.full[case.lower, case.shapes] = outcomes
        return self.full.get((case.lower, case.shapes))

    def _train(self, batches: Sequence[Batch], compiled: Any = None) -> Trained:
        self.built.model.load_state_dict(self.initial)
        return train(self.built, batches, compiled)


def errors(mine: Sequence[Outcome], eager: Sequence[Outcome]) -> dict[str, Any]:
    """How far two steps are from eager PyTorch's."""
    pairs = list(zip(mine, eager, strict=True))
    return {
        "gradient_error": _finite(max(a.gradient_distance(b) for a, b in pairs)),
        "parameter_error": _finite(max(parameter_distance(a, b) for a, b in pairs)),
        "output_error": _finite(max(distances(a.outputs, b.outputs) for a, b in pairs)),
        "same_state": all(
            torch.equal(a.random_state, b.random_state)
            and distances(a.buffers, b.buffers) <= LIMIT["inductor"]
            for a, b in pairs
        ),
    }


def parameter_distance(mine: Outcome, eager: Outcome) -> float:
    """The worst relative difference of one parameter's gradient."""
    norms = (g.double().norm().square() for g in eager.gradients.values())
    return distances(mine.gradients, eager.gradients, FLOOR * math.sqrt(float(sum(norms))))


def distances(
    mine: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], floor: float = 0.0
) -> float:
    """The worst of the norms of the differences, each relative to its norm or the floor."""
    if mine.keys() != other.keys():
        return math.inf
    return max((_distance(mine[k], other[k], floor) for k in other), default=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    # A mask's infinities must stand in the same places; the rest is compared as numbers.
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite], b[~finite]):
        return math.inf
    x, y = a[finite].double(), b[finite].double()
    return float((x - y).norm()) / max(float(y.norm()), floor, torch.finfo(torch.float64).tiny)


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def replays(module: fx.GraphModule) -> int:
    targets: Iterable[Any] = (n.target for n in module.graph.nodes)
    return sum("run_with_rng_state" in str(t) for t in targets)


def reason(error: BaseException) -> str:
    """What raised, in a line: the error inside what Dynamo wraps around it."""
    inner = getattr(error, "inner_exception", None) or error
    lines: Iterator[str] = (line.strip() for line in str(inner).splitlines())
    first = next((line for line in lines if line), "")
    return f"{type(inner).__name__}: {first[:300]}"

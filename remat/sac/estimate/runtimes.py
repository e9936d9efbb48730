"""What operators take, in milliseconds: modelled or measured."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.costs import CostModel, Profile, Roofline
from remat.sac.estimate.stats import PS_PER_MS
from remat.sac.run.recording import Call

#: The mode in which operators really run.
BENCHMARK = "operator-level-benchmark"
#: Names of the modes, with the cost model behind each.
MODES: dict[str, type[CostModel]] = {
    BENCHMARK: Profile,
    "operator-level-cost-model": Roofline,
}


def model_of(mode: str, cost: CostModel | None = None) -> CostModel:
    """The cost model of a mode, or the one that is given for it.

    Raises:
        ProblemError: no such mode, or the model does not count picoseconds.
    """
    if mode not in MODES:
        raise ProblemError(
            f"estimate_mode_type is {mode!r}; expected {' or '.join(map(repr, MODES))}"
        )
    if cost is None:
        return MODES[mode]()
    if cost.unit != "ps":
        raise ProblemError(
            f"cost model '{cost}' counts {cost.unit}; runtimes need one that counts picoseconds, "
            "such as 'roofline' or 'profile'"
        )
    return cost


def runtimes(calls: Iterable[Call], model: CostModel) -> dict[fx.Node, float]:
    """Milliseconds of everything that the calls run.

    Where runtimes are measured, views are as well: on a CPU they take their microsecond. A model
    gives them nothing, nor memory that is allocated and not written.
    """
    shown = [c for c in calls if not c.skipped]
    if isinstance(model, Profile):
        asked = [part for c in shown for part in c.parts]
    else:
        asked = [
            part
            for c in shown
            if not c.is_view
            for part in c.parts
            if not ops.is_uninitialised(part)
        ]
    found = {part: 0.0 for c in shown for part in c.parts}
    with _disable_current_modes():  # a model may make tensors of its own
        costs = model.costs(asked)
    found.update((n, ps / PS_PER_MS) for n, ps in zip(asked, costs, strict=True))
    return found

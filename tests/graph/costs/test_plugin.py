"""A plugin's own cost model: registered, planned with, and not believed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import remat
from remat.errors import ProblemError
from remat.graph.costs import CostModel
from remat.plugins.registry import registry
from tests.graph.costs.pricing import costs, products
from tests.graphs import traced


class Picky(CostModel):
    """Products cost what follows the colon, everything else 1."""

    name = "picky"
    unit = "coin"
    summary = "products are dear"

    def __init__(self, price: int = 100) -> None:
        self.price = price

    @classmethod
    def parse(cls, argument: str | None) -> CostModel:
        return cls() if argument is None else cls(int(argument))

    def cost(self, node: fx.Node) -> int:
        return self.price if "mm" in str(node.target) else 1

    def __str__(self) -> str:
        return f"{self.name}:{self.price}"


class Plugin:
    """What an entry point of the group ``remat`` names."""

    @remat.hookimpl
    def remat_cost_models(self) -> list[type[CostModel]]:
        return [Picky]


@pytest.fixture
def plugin() -> Iterator[None]:
    with registry().registered(Plugin(), "pricing"):
        yield


@pytest.mark.usefixtures("plugin")
def test_a_plugins_model_plans() -> None:
    assert registry().cost_models["picky"] is Picky
    cheap, dear = (remat.plan(products(), 0.0, cost=c) for c in ("picky:1", "picky:1000"))
    assert (dear.cost, dear.unit) == ("picky:1000", "coin")
    again = sum("mm" in name for name in dear.recomputed)
    assert again > 0
    assert dear.recompute_cost == again * 1000 + len(dear.recomputed) - again
    assert cheap.recompute_cost == len(cheap.recomputed)
    assert remat.plan(products(), plan=remat.Plan.from_json(dear.to_json())).cost == "picky:1000"


def model(answer: Any, *, looks_around: bool = False) -> CostModel:
    class Answer(CostModel):
        name = "answering"
        unit = "op"
        contextual = looks_around

        def cost(self, node: fx.Node) -> int:
            if isinstance(answer, Exception):
                raise answer
            return answer(node) if callable(answer) else answer

    return Answer()


@pytest.mark.parametrize(
    "answer", [math.nan, math.inf, -0.5, np.float64("nan"), 1j, True, "7", None]
)
def test_a_bad_answer_stops_planning_with_the_models_name(answer: Any) -> None:
    says = r"cost model 'answering' says that 'mm' \(aten\.mm\.default\) costs .*finite number of 0"
    with pytest.raises(ProblemError, match=says):
        remat.plan(products(), 0.5, cost=model(answer))


def test_a_model_that_raises_is_named_with_the_node() -> None:
    says = r"cost model 'answering' raised KeyError for 'mm' \(aten\.mm\.default\): 'price'"
    with pytest.raises(ProblemError, match=says) as raised:
        remat.plan(products(), 0.5, cost=model(KeyError("price")))
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(ProblemError, match=r"^as it is"):
        remat.plan(products(), 0.5, cost=model(ProblemError("as it is")))


@pytest.mark.parametrize(
    ("answer", "cost"),
    [(2, 2), (1.25, 2), (0, 0), (np.int64(2**60 + 1), 2**60 + 1), (Fraction(5, 2), 3)],
)
def test_every_kind_of_number_becomes_an_int(answer: Any, cost: int) -> None:
    found = costs(traced(torch.relu, torch.randn(3)), model(answer))
    assert found["relu"] == cost
    assert type(found["relu"]) is int


def test_a_model_may_answer_for_all_nodes_at_once() -> None:
    class AtOnce(CostModel):
        name = "at-once"
        unit = "op"
        short = 0

        def costs(self, nodes: Sequence[fx.Node]) -> Sequence[int]:
            return range(len(nodes) - self.short)

    assert max(costs(products(), AtOnce()).values()) > 1
    AtOnce.short = 1
    with pytest.raises(ProblemError, match=r"'at-once' gave \d+ costs for \d+ nodes; AtOnce.costs"):
        costs(products(), AtOnce())


@pytest.mark.parametrize("looks_around", [False, True])
def test_identical_calls_are_asked_for_once(looks_around: bool) -> None:
    asked: list[str] = []

    def ask(node: fx.Node) -> int:
        asked.append(node.name)
        return 3

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.mm(x, w)
        return torch.mm(torch.mm(x[:2], w), torch.mm(w, w))

    products = ["mm", "mm_1", "mm_2", "mm_3", "mm_4", "mm_5", "mm_6"]
    found = costs(
        traced(f, torch.randn(4, 4), torch.randn(4, 4)), model(ask, looks_around=looks_around)
    )
    assert [found[n] for n in products] == [3] * 7
    # Other sizes, and the same tensor twice, make another call.
    assert asked == (products if looks_around else ["mm", "mm_4", "mm_5"])


class Unsure(Picky):
    """Cannot price everything itself, and says so."""

    name = "unsure"

    def fallbacks(self, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
        return ("aten.mm.default: no scales at hand; a guess stood in",)


def test_a_plan_lists_what_its_cost_model_could_not_price() -> None:
    plan = remat.plan(products(), budget=0.5, cost=Unsure())
    assert plan.fallbacks == Unsure().fallbacks(())
    assert "no scales at hand" in plan.explain()
    assert remat.Plan.from_json(plan.to_json()).fallbacks == plan.fallbacks
    assert remat.plan(products(), budget=0.5).fallbacks == ()

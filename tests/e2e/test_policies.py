"""Policies by module in compiled steps, and on real architectures."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetWarning, PlanError
from tests.model_types import make
from tests.models import build
from tests.planning.test_host_memory import kept_inside
from tests.planning.test_policies import Net, assert_holds, saved_inside


def test_gradients_are_those_of_eager_to_the_bit() -> None:
    """With dropout; of each layer, one module is recomputed, and another goes to the host."""
    step = build("gpt2")
    options = {
        "lower": "eager",
        "budget": 0.5,
        "policies": {"*.h.*": "recompute", "*.attn": "offload", "*.ln_1": "save"},
        "host_memory": "1GiB",
    }
    outcome = step.train(torch.compile(step.model, backend="remat", options=options))
    assert outcome.differs_from(build("gpt2").train()) == []
    plan = remat.plans()[-1]
    assert plan.policies
    assert plan.host_bytes
    assert kept_inside(plan, "*.attn") == []
    assert saved_inside(plan, "*.mlp") == []


def test_policies_hold_in_the_finished_graphs() -> None:
    built = make("convnext")
    policies = {"*.stages.1": "recompute", "*.stages.0": "save"}
    joint = remat.capture(built.model, (), built.same[0])
    for budget in (1, 0, "peak:0.5"):
        assert_holds(joint, remat.plan(joint, budget, policies=policies), policies)
    assert saved_inside(remat.plan(joint), "*.stages.1"), "the pattern changes something"


# Which graphs a pattern is about ----------------------------------------------------------------------


def test_a_pattern_without_a_module_ends_the_compilation() -> None:
    model, options = Net(), {"lower": "eager", "policies": {"*.mpl": "save"}}
    with pytest.raises(PlanError, match=r"nearest are layers\.0\.mlp"):
        torch.compile(model, backend="remat", options=options)(torch.randn(4, 32))


def test_blocks_that_are_compiled_one_by_one_have_names_of_their_own() -> None:
    model, before = Net(), len(remat.plans())
    backend = remat.backend(lower="eager", policies={"*.mlp": "recompute"})
    for layer in model.layers:
        layer.compile(backend=backend)
    model(torch.randn(4, 32)).backward()
    made = remat.plans()[before:]
    assert made
    assert all(saved_inside(plan, "mlp") == [] for plan in made)
    assert all("mlp" in plan.explain() for plan in made)
    torch._dynamo.reset()
    refusing = remat.backend(lower="eager", policies={"layers.0": "recompute"})
    model = Net()
    model.layers[0].compile(backend=refusing)
    with pytest.raises(
        PlanError, match="in a block that is compiled by itself they begin inside of it"
    ):
        model(torch.randn(4, 32))


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.head(self.layers[1](x)).sum()


def test_a_pattern_may_match_in_a_later_graph_of_a_step() -> None:
    options = {"lower": "eager", "policies": {"layers.1.mlp": "recompute"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        torch.compile(Broken(), backend="remat", options=options)(torch.randn(4, 32)).backward()
    assert saved_inside(remat.plans()[-1], "layers.1.mlp") == []


def test_a_pattern_that_matches_in_no_graph_of_a_step_is_warned_of() -> None:
    options = {"lower": "eager", "policies": {"layers.1.mlp": "recompute", "*.mpl": "save"}}
    with pytest.warns(
        BudgetWarning, match=r"'\*\.mpl' match no module .* has graph breaks"
    ) as told:
        torch.compile(Broken(), backend="remat", options=options)(torch.randn(4, 32)).backward()
    assert {w.filename for w in told} == {__file__}, "a warning names the user's line"


def test_marked_code_under_torch_compile() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x @ self.w).sin()
            with remat.region("recompute"):
                x = ((x @ self.w).cos() @ self.w).exp()
            return (x.tanh() @ self.w).sum()

    model, x = Marked(), torch.randn(4, 8)
    model(x).backward()
    assert model.w.grad is not None
    expected = model.w.grad.clone()
    model.w.grad = None
    torch.compile(model, backend="remat", options={"lower": "eager"})(x).backward()
    assert torch.equal(model.w.grad, expected)
    assert "mm_1" in remat.plans()[-1].recomputed
    assert "remat.region('recompute')" in remat.plans()[-1].explain()

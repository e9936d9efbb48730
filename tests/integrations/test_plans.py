"""`remat.plans`: bounded, and no reason for a graph to stay in memory."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import remat
from remat.errors import PlanError, record_warnings, warn
from remat.integrations import backend, budget_loop, compile_log, stages

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new_is_collected() -> None:
    """What other tests have left in the process would take a second at each collection."""
    gc.collect()
    gc.freeze()


def compiled(lower: str, **options: Any) -> Any:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    options = {"budget": 0.0, "lower": lower, **options}
    f = torch.compile(model, backend="remat", options=options)
    f(torch.randn(4, 8)).sum().backward()
    return f


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_modules_of_a_plan_and_options_go_with_the_last_step(lower: str) -> None:
    """`torch._dynamo.reset` lets steps go, and what backends remember of their options with them."""
    of_another_graph = remat.plan(
        remat.capture(nn.Linear(4, 4), (torch.randn(2, 4),), lower=lower), 0.5
    )
    f = compiled(lower, plan=of_another_graph)
    option = weakref.ref(of_another_graph)
    del of_another_graph
    gc.collect()
    assert option() is not None
    plan = remat.plans()[-1]
    assert len(plan.forward.graph.nodes) > 0
    rows, module = plan.explain(), weakref.ref(plan.forward)
    del plan, f
    torch._dynamo.reset()
    gc.collect()
    assert module() is None, "nobody holds it but the list of plans"
    assert option() is None
    figures = remat.plans()[-1]
    shown = figures.explain().splitlines()
    assert shown == rows.splitlines()[: len(shown)]
    with pytest.raises(PlanError, match="its compiled step is deleted"):
        _ = figures.forward


@pytest.mark.parametrize(
    ("lower", "module", "fails"),
    [
        ("eager", backend, "boxed"),
        ("eager", stages, "guard_sizes"),
        ("inductor", budget_loop, "compile_graph"),
    ],
)
@torch._functorch.config.patch(enable_autograd_cache=False)
def test_a_plan_whose_step_is_not_compiled_is_not_listed(
    lower: str, module: Any, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    compiled("eager")  # a plan whose modules are gone stays
    torch._dynamo.reset()
    gc.collect()
    before = remat.plans()
    with monkeypatch.context() as patched:
        patched.setattr(module, fails, refuse)
        with pytest.raises(BackendCompilerFailed, match="no such kernel"):
            compiled(lower)
    assert remat.plans() == before


def test_the_list_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_log._PLANS.maxlen == compile_log.MOST_PLANS == 1_000
    monkeypatch.setattr(compile_log, "_PLANS", deque(maxlen=2))
    joint = remat.capture(nn.Linear(4, 4), (torch.randn(2, 4),), lower="eager")
    for budget in (0, 0.5, 1):
        copy = joint.copy()
        remat.partitioner(budget)(copy.graph_module, [None], num_fwd_outputs=copy.num_fwd_outputs)
    assert [p.budget for p in remat.plans()] == ["0.5", "1"]


def test_warnings_are_noted_in_their_own_thread_only() -> None:
    def elsewhere() -> None:
        warn("in another thread", UserWarning)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with record_warnings() as noted:
            warn("here", UserWarning)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    assert noted == [("here", UserWarning)]


def test_a_plan_has_the_name_of_the_users_module() -> None:
    """Dynamo lists only the submodules, of whichever class they are."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).sum()

    for model in (Outer(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())):
        torch.compiler.reset()
        torch.compile(model, backend="remat", options={"lower": "eager"})(torch.randn(2, 4))
        assert remat.plans()[-1].graph.split()[0] == type(model).__name__

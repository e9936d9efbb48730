"""The partitioner and a solver by themselves, where PyTorch takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._functorch import config as functorch_config

import remat
from tests.e2e.doors import Mlp, NewPlans, aot, assert_same, stepped
from tests.models import build

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_partitioner_as_partition_fn(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    f = torch.compile(mlp, backend=aot(remat.partitioner(0.2, solver="greedy")))
    assert_same(stepped(mlp, f, x), stepped(mlp, mlp, x))
    assert [p.budget for p in new_plans()] == ["0.2"]


def test_inductor_is_told_which_inputs_stay_where_they_are(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    """A batch that backward reads again lies elsewhere in every step; parameters do not."""
    f = torch.compile(mlp, backend=aot(remat.partitioner(0)))
    f(x).sum().backward()
    (plan,) = new_plans()
    told = {
        tuple(n.meta["val"].shape): n.meta["is_static_input"]
        for n in plan.backward.graph.find_nodes(op="placeholder")
        if n.name.startswith("primals")
    }
    assert told.pop(tuple(x.shape)) is False
    assert told
    assert all(told.values())


def test_partitioner_inside_inductor(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    from torch._inductor import config

    with (
        config.patch(custom_partitioner_fn=remat.partitioner(0.2, "dp"), fallback_random=True),
        functorch_config.patch(enable_autograd_cache=False),  # a cached step is not planned anew
    ):
        f = torch.compile(mlp)
        mine = stepped(mlp, f, x)
    for a, b in zip(mine, stepped(mlp, mlp, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [p.budget for p in new_plans()] == ["0.2"]


def test_uuid_tells_every_option_apart(mlp: Mlp, x: torch.Tensor) -> None:
    plan = remat.plan(remat.capture(mlp, (x,), lower="eager"), 0.3, "greedy")
    variants: list[dict[str, Any]] = [
        {},
        {"budget": 0.25},
        {"budget": "saved:1MiB"},
        {"solver": "greedy"},
        {"solver": "dp"},
        {"cost": "flops"},
        {"cost": "roofline:a100"},
        {"time_limit": 5.0},
        {"plan": plan},
    ]
    uuids = [remat.partitioner(**v).uuid() for v in variants]
    assert len(set(uuids)) == len(variants)
    assert uuids == [remat.partitioner(**v).uuid() for v in variants]
    assert all(remat.__version__ in u for u in uuids)
    assert remat.torch_solver("dp").uuid() != remat.torch_solver("greedy").uuid()


@pytest.mark.parametrize(
    "options", [{"budget": -1}, {"solver": "nobody"}, {"cost": "guess"}, {"plan": "{}"}]
)
def test_partitioner_refuses_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(remat.RematError):
        remat.partitioner(**options)


def test_our_solver_in_pytorchs_own_partitioner() -> None:
    asked: list[remat.KnapsackProblem] = []

    class Spy(remat.Solver):
        name = "spy"

        def solve(self, problem: remat.KnapsackProblem, **kwargs: Any) -> list[int]:
            asked.append(problem)
            return list(remat.solve(problem, "dp").saved)

    step = build("llama")
    with functorch_config.patch(
        activation_memory_budget=0.5, activation_memory_budget_solver=remat.torch_solver(Spy())
    ):
        f = torch.compile(step.model, backend=aot(min_cut_rematerialization_partition))
        outcome = step.train(f)
    assert asked, "PyTorch did not ask our solver"
    assert asked[0].weights
    assert outcome.gradient_distance(step.train()) <= 1e-5


@pytest.mark.parametrize("inputs", [0, 10**13])
def test_pytorchs_shares_are_read_in_bytes(inputs: int) -> None:
    """A third of three equal tensors is one, also where the inputs weigh ten thousand times as much."""
    graph, n, nbytes = torch.fx.Graph(), 21, 4 * 4096 * 3000
    nodes = [graph.call_function(torch.ops.aten.mm.default) for _ in range(n)]
    for node in nodes:
        node.meta["val"] = torch.empty(4096, 3000, device="meta")
        node.args = tuple(graph.placeholder(f"x{i}") for i in range(2))
        for x in node.args:
            x.meta["val"] = torch.empty(2, 2, device="meta")
    span = (inputs + n * nbytes) / 1e9 - inputs / 1e9
    memory = [nbytes / 1e9 / span] * n
    solve = remat.torch_solver("greedy")
    with functorch_config.patch(activation_memory_budget_runtime_estimator="testing"):
        for k in range(n + 1):
            saved, recomputed = solve(memory, graph, k / n, None, nodes)
            assert (len(saved), len(recomputed)) == (k, n - k)
        saved, _ = solve([0.5000000000000001] * 2, graph, 0.5, None, nodes[:2])
        assert len(saved) == 1, "shares that are not of these tensors are taken as they are"


@pytest.mark.parametrize("solver", remat.solver_names())
def test_every_solver_in_pytorchs_own_partitioner(solver: str) -> None:
    torch.manual_seed(0)
    model, x = Mlp().eval(), torch.randn(128, 64)
    with functorch_config.patch(
        activation_memory_budget=0.5, activation_memory_budget_solver=remat.torch_solver(solver)
    ):
        f = torch.compile(model, backend=aot(min_cut_rematerialization_partition))
        assert_same(stepped(model, f, x), stepped(model, model, x))

"""The partitioner and a solver by themselves, where PyTorch takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._functorch import config as functorch_config

import remat
from remat.plugins import registry
from tests.e2e.doors import Mlp, NewPlans, aot
from tests.hard.steps import assert_same, step


def test_partitioner_as_partition_fn(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    """Inductor is told that a batch, which backward reads again, lies elsewhere in every step."""
    f = torch.compile(mlp, backend=aot(remat.partitioner(0, solver="greedy")))
    assert_same(step(f, (x,), mlp), step(mlp, (x,), mlp), 0.0)
    (plan,) = new_plans()
    assert float(plan.budget) == 0
    told = {
        tuple(n.meta["val"].shape): n.meta["is_static_input"]
        for n in plan.backward.graph.find_nodes(op="placeholder")
        if n.name.startswith("primals")
    }
    assert told.pop(tuple(x.shape)) is False
    assert told
    assert all(told.values()), "parameters stay where they are"


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
        {"reread_inputs": False},
        {"hooks": "bf16"},
        {"hooks": "float8"},
        {"hooks": (lambda x: x * 2, lambda p: p / 2)},
        {"hooks": (lambda x: x + 2, lambda p: p - 2)},
    ]
    uuids = [remat.partitioner(**v).uuid() for v in variants]
    assert len(set(uuids)) == len(variants)
    assert uuids == [remat.partitioner(**v).uuid() for v in variants]
    assert [remat.partitioner(**v).cacheable for v in variants[-3:]] == [True, False, False]
    assert all(remat.__version__ in u for u in uuids)
    assert remat.torch_solver("dp").uuid() != remat.torch_solver("greedy").uuid()


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
    # This solver deliberately saves fewer bytes than the capacity allows.
    names = {*remat.solver_names()} - {"dynamic_memory_budget_dp"}
    solvers = sorted(name for name in names if "knapsack" in registry().solver_class(name).solves)
    with functorch_config.patch(activation_memory_budget_runtime_estimator="testing"):
        for k in range(n + 1):
            # Each solver is asked for some of the shares.
            solve = remat.torch_solver(solvers[k % len(solvers)])
            saved, recomputed = solve(memory, graph, k / n, None, nodes)
            assert (len(saved), len(recomputed)) == (k, n - k)
        saved, _ = solve([0.5000000000000001] * 2, graph, 0.5, None, nodes[:2])
        assert len(saved) == 1, "shares that are not of these tensors are taken as they are"


class Own(remat.Solver):
    """Notes which problems PyTorch asks about."""

    name = "own"

    def __init__(self) -> None:
        self.asked: list[remat.KnapsackProblem] = []

    def solve(self, problem: remat.KnapsackProblem, **kwargs: Any) -> list[int]:
        self.asked.append(problem)
        return list(remat.solve(problem, "dp").saved)


def test_a_solver_in_pytorchs_own_partitioner() -> None:
    torch.manual_seed(0)
    model, x, solver = Mlp().eval(), torch.randn(128, 64), Own()
    with functorch_config.patch(
        activation_memory_budget=0.2, activation_memory_budget_solver=remat.torch_solver(solver)
    ):
        f = torch.compile(model, backend=aot(min_cut_rematerialization_partition))
        assert_same(step(f, (x,), model), step(model, (x,), model), 0.0)
    assert solver.asked, "PyTorch did not ask our solver"

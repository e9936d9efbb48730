"""Plans under a budget on the peak, with orders: what they come to, and what they change: nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.errors import RefusalError, SolverError
from remat.running.differences import first_difference
from remat.running.trial import Trial
from remat.solvers.kernel import kernel
from remat.solvers.knapsack.greedy import Greedy
from remat.solvers.knapsack.native import Native
from tests.graphs import joint_of, weight
from tests.hard.steps import assert_same, compiled, drawn, step
from tests.models import Noisy, build

pytestmark = pytest.mark.skipif(kernel() is None, reason="the kernel is not compiled here")

Program = Callable[..., torch.Tensor]


def pooled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns the values of a pooling, whose indices backward may make again."""
    for _ in range(3):
        x = F.max_pool2d(torch.relu(F.conv2d(x, w, padding=1)), 3, 1, 1)
    return x.flatten(1)


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        first, second = torch.tanh(x @ w).split([8, 24], 1)
        x = F.dropout(torch.cat([torch.linalg.qr(second).Q, first], 1), 0.3, training=True)
    return x * torch.bernoulli(torch.full_like(x, 0.5))


CASES = {
    "pooled": lambda: joint_of(pooled, weight(2, 4, 8, 8), weight(4, 4, 3, 3)),
    "dropped": lambda: joint_of(dropped, weight(32, 32), weight(32, 32)),
    "opaque": lambda: captured("custom_mutating"),
}


def captured(name: str) -> remat.JointGraph:
    step = build(name)
    return remat.capture(step.model, step.args, step.kwargs, lower="eager")


@pytest.mark.parametrize("name", CASES)
def test_a_peak_changes_nothing_and_holds(name: str) -> None:
    joint = CASES[name]()
    trial = Trial.of(joint)
    wanted, n = trial.run_joint(joint), joint.num_fwd_outputs
    plans = [remat.plan(joint, remat.Peak(share)) for share in (1, 0.5, 0.0)]
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < peaks[0]
    assert plans[1].peak_bytes <= peaks[2] + (peaks[0] - peaks[2]) / 2
    for plan in plans:
        assert first_difference(wanted, trial.run_graphs(plan.forward, plan.backward, n)) is None
    ordered = plans[2]
    assert ordered.forward_order
    again = remat.plan(joint, plan=remat.Plan.from_json(ordered.to_json()))
    assert str(again.forward.graph) == str(ordered.forward.graph)
    assert str(again.backward.graph) == str(ordered.backward.graph)
    assert (again.peak_bytes, again.recompute_cost) == (peaks[2], ordered.recompute_cost)
    assert "recomputed" in ordered.explain()
    assert "views included" not in ordered.explain()  # its orders name none


def test_compiled_steps_leave_behind_what_eager_ones_do() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.randn(32, 32) / 6), nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = torch.relu(self.norm(dropped(x, self.weight)))
                # The step takes less memory if each product is summed before the next one is computed.
                wide = [x @ (k * self.weight).repeat(1, 32) for k in (1, 2, 3)]
                x = x + sum(torch.tanh(product).sum(1, keepdim=True) for product in wide)
            return x

    def left(how: Callable[[nn.Module], Any]) -> dict[str, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model().train()
        return step(how(model), (drawn(32, 32),), model)

    assert_same(left(partial(compiled, budget=remat.Peak(0.0))), left(lambda model: model), 0.0)
    assert remat.plans()[-1].forward_order


def test_a_draw_that_backward_makes_before_it_reads_a_gradient_runs() -> None:
    """Nobody reads it, and the random stream after the step goes on from it."""
    joint = joint_of(lambda w: (w.cos() @ w.cos()).cos(), weight(8, 8))
    first = next(n for n in joint.graph.nodes if n.name == "mul")
    with joint.graph.inserting_before(first):
        draw = joint.graph.call_function(
            torch.ops.aten.randn.default, ([8, 8],), {"device": torch.device("cpu")}
        )
    with first.meta["val"].fake_mode:
        draw.meta = {"val": torch.randn(8, 8), "partitioner_tag": "is_backward"}
    plan = remat.plan(joint, remat.Peak(0.0))
    assert "randn_default" in [n.name for n in plan.backward.graph.nodes]


class Scheduler(remat.Solver):
    """A stranger's solver: greedy within bytes, with schedules of its own."""

    name = "scheduler"

    def solve(self, problem: remat.KnapsackProblem, *, time_limit: float | None = None) -> object:
        return Greedy().solve(problem)

    def solve_schedule(
        self, problem: remat.ScheduleProblem, *, time_limit: float | None = None
    ) -> object:
        return Native().solve_schedule(problem)


class Refusing(Scheduler):
    name = "refusing"

    def solve_schedule(
        self, problem: remat.ScheduleProblem, *, time_limit: float | None = None
    ) -> object:
        raise RefusalError(self.name, "takes no such step")


class Wrong(Scheduler):
    name = "wrong"

    def solve_schedule(
        self, problem: remat.ScheduleProblem, *, time_limit: float | None = None
    ) -> object:
        return problem.hints[0][1:]


@pytest.fixture(scope="module")
def noisy() -> remat.JointGraph:
    return remat.capture(Noisy(depth=2), (torch.randn(32, 64),), lower="inductor")


def within(joint: remat.JointGraph, solver: str | remat.Solver) -> remat.Plan:
    return remat.plan(joint, remat.Peak(0.3), solver=solver, cost="roofline:h100")


def test_a_named_solvers_schedule_decides_the_plan_if_it_is_cheaper(
    noisy: remat.JointGraph,
) -> None:
    by_bytes, plan = within(noisy, "greedy"), within(noisy, Scheduler())
    assert not by_bytes.forward_order
    assert plan.solver == "scheduler"
    assert plan.forward_order
    assert plan.recompute_cost < by_bytes.recompute_cost
    trial = Trial.of(noisy)
    wanted, n = trial.run_joint(noisy), noisy.num_fwd_outputs
    assert first_difference(wanted, trial.run_graphs(plan.forward, plan.backward, n)) is None
    rows = remat.compare(
        noisy, solvers=["greedy", Scheduler()], budgets=[remat.Peak(0.3)], cost="roofline:h100"
    ).rows
    assert "no plan was found within it by 'greedy'" in rows[0].reason
    assert (rows[1].reason, rows[1].decided_by) == (None, "scheduler")


def test_a_solver_that_refuses_a_step_decides_by_bytes_alone(noisy: remat.JointGraph) -> None:
    assert within(noisy, Refusing()).recompute_cost == within(noisy, "greedy").recompute_cost


def test_a_wrong_schedule_is_refused_by_name(noisy: remat.JointGraph) -> None:
    """Like all wrong answers of `tests/solvers/schedule/test_schedule_problem.py`."""
    with pytest.raises(SolverError, match="solver 'wrong' returned a schedule that cannot run"):
        within(noisy, Wrong())

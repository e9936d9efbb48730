"""Random legal orders with further runs: the same numbers, and the memory that the schedule says."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.errors import PlanError, RematError
from remat.graph.memory.liveness import memory_curve, timeline
from remat.graph.problems.lowering import Decision
from remat.graph.verify import Split, verify
from remat.passes.core.state import State
from remat.passes.split.arrangement import arrange
from remat.planning.context import GraphContext
from remat.planning.pipelines import prepare, split
from remat.planning.request import PlanRequest
from remat.planning.search.proposers.orders import Orders
from remat.planning.search.schedules import Schedules
from remat.running.differences import first_difference
from remat.running.trial import Trial
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule
from tests.graphs import calls, joint_of, placeholders, weight

Program = Callable[..., Any]


def views(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = (x @ w).tanh()
    z = y.T @ y.view(-1, 16).exp() * y.diagonal()
    return z.sin(), y[1:]


def tuples(x: torch.Tensor, w: torch.Tensor) -> Any:
    first, second = (x @ w).split([4, 12], 1)
    value, mean = torch.var_mean(second.sort(1).values, 1, keepdim=True)
    return torch.cat([first.cos(), (second - mean) * value.rsqrt()], 1) @ w


def draws(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = F.dropout((x @ w).tanh(), 0.3, training=True)
    z = (y @ w) * torch.bernoulli(torch.full_like(y, 0.5)) + torch.rand(16)
    return F.dropout(z.sin(), 0.5, training=True).sum()


class Normed(nn.Module):
    """Writes to buffers, and chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.norm(self.linear(x)).chunk(2, 1)
        return torch.sigmoid(one) * other.exp()


PROGRAMS: dict[str, Program] = {"views": views, "tuples": tuples, "draws": draws, "normed": Normed}


@functools.cache
def searched(name: str) -> tuple[State, Orders, Trial]:
    torch.manual_seed(0)
    made = PROGRAMS[name]
    if made is Normed:
        joint = joint_of(Normed().train(), torch.randn(16, 16))
    else:
        joint = joint_of(made, weight(16, 16), weight(16, 16))
    state = prepare(joint)
    context = GraphContext(state, PlanRequest.of(cost="unit"), fingerprint=joint.fingerprint)
    return state, Orders(Schedules(context)), Trial.of(joint)


def schedule(problem: ScheduleProblem, seed: int) -> tuple[list[int], int]:
    """A random legal schedule, and its boundary; two of three have further runs."""
    draw = random.Random(seed)
    backward, forward = set(problem.backward), set(problem.forward)
    runnable = set(problem.runnable)
    again = sorted(runnable.difference(problem.once))
    needs = {v: {problem.maker(u) for u in problem.inputs[v]} & runnable for v in runnable}
    for before, v in zip(problem.ordered, problem.ordered[1:], strict=False):
        needs[v].add(before)
    done: set[int] = set()
    runs: list[int] = []
    boundary = -1
    while left := runnable - done:
        may = [v for v in left if needs[v] <= done and (v not in backward or forward <= done)]
        v = draw.choice(sorted(may))
        if v in backward and boundary < 0:
            boundary = len(runs)
        runs.append(v)
        done.add(v)
        while draw.random() < (0.0, 0.3, 0.6)[seed % 3]:
            more = [w for w in again if w in done]
            runs += draw.sample(more, min(1, len(more)))
    return runs, boundary


def carried_out(state: State, decision: Decision) -> tuple[State, Split]:
    done = split(replace(state, decision=decision, limits=None))
    assert done.forward is not None
    assert done.backward is not None
    made = Split(joint=done.joint, forward=done.forward, backward=done.backward)
    verify(made)
    return done, made


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_orders_change_nothing_and_peak_where_they_say(name: str) -> None:
    state, search, trial = searched(name)
    wanted = trial.run_joint(state.joint)
    replayed = carried = repeats = 0
    for seed in range(12):
        runs, boundary = schedule(search._free, seed)
        decision = search.decision_of(runs, boundary)
        if decision is None:  # forward would read what it has written to
            assert name == "normed"
            continue
        _, made = carried_out(state, decision)
        n = state.joint.num_fwd_outputs
        assert first_difference(wanted, trial.run_graphs(made.forward, made.backward, n)) is None
        peak = memory_curve(made.forward, made.backward, n, state.joint.memories).peak_bytes
        assert peak == timeline(made.forward, made.backward, n).peak_bytes
        assert peak <= evaluate_schedule(search._free, runs, boundary).peak_bytes
        carried += 1
        repeats += len(decision.further_runs)
        replays = [c for half in (made.forward, made.backward) for c in map(str, half.graph.nodes)]
        replayed += sum("dropout_again" in c for c in replays)
    assert carried >= 3
    assert repeats > 10
    assert replayed > 3 or name != "draws"


@pytest.fixture(scope="module")
def product() -> tuple[State, Decision]:
    """A product, its tanh, a view of that, and what reads the view."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().T.exp().sum()

    state = prepare(joint_of(step, weight(8, 8), weight(8, 8)))
    return state, Decision(
        saved=("primals_1", "primals_2", "exp", "tanh"),
        forward_order=("mm", "tanh", "exp", "sum_1"),
        backward_order=("mul", "tanh_backward", "mm_1", "mm_2"),
    )


def runs(state: State, decision: Decision, *names: str) -> list[str]:
    found = arrange(state, replace(decision, forward_order=names))
    return [state.index.nodes[i].name for i in found.forward]


def test_a_view_is_made_where_it_is_read_and_anew_after_a_further_run(
    product: tuple[State, Decision],
) -> None:
    found = runs(*product, "mm", "tanh", "exp", "sum_1")
    assert found == ["mm", "tanh", "permute", "exp", "sum_1"]
    found = runs(*product, "mm", "tanh", "exp", "tanh", "exp", "exp", "sum_1")
    assert found == ["mm", "tanh", "permute", "exp", "tanh", "permute", "exp", "exp", "sum_1"]


def test_runs_have_names_of_their_own(product: tuple[State, Decision]) -> None:
    state, decision = product
    order = ("mm", "tanh", "tanh", "tanh", "exp", "sum_1")
    _, made = carried_out(
        state,
        replace(
            decision,
            forward_order=order,
            backward_order=("tanh", *decision.backward_order),
            saved=("primals_1", "primals_2", "exp", "mm"),
        ),
    )
    assert calls(made.forward)[:4] == ["mm", "tanh_again", "tanh_again_1", "tanh"]
    assert "tanh" in calls(made.backward)
    # What is handed over, and runs again before anybody reads it, keeps its name as an input.
    again = ("mul", "tanh_backward", "tanh", "mm_1", "mm_2")
    _, made = carried_out(state, replace(decision, backward_order=again))
    assert "tanh" in placeholders(made.backward)
    assert "tanh_again" in calls(made.backward)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (("mm", "exp", "tanh", "sum_1"), "'tanh' is not there for 'exp'"),
        (
            ("tanh", "exp", "sum_1"),
            "runs 'mm' neither in forward nor in backward, but something reads it",
        ),
        (("mm", "tanh", "exp"), "runs 'sum_1' neither in forward nor in backward"),
        (("mm", "cosh", "tanh", "exp", "sum_1"), "runs 'cosh', but the joint graph has no such"),
        (("primals_1", "mm", "tanh", "exp", "sum_1"), "'primals_1', which is a placeholder"),
        (("mm", "tanh", "exp", "sum_1", "mm_1"), "'tanh_backward' is not there for 'mm_1'"),
    ],
)
def test_an_order_that_cannot_run_is_refused(
    product: tuple[State, Decision], forward: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        runs(*product, *forward)
    assert "\n" not in str(caught.value)


def edited(plan: remat.Plan, joint: remat.JointGraph, **orders: Sequence[str]) -> str:
    """Why a saved plan with other orders is refused."""
    text = json.dumps({**json.loads(plan.to_json()), **orders})
    with pytest.raises(RematError) as caught:
        remat.plan(joint, plan=remat.Plan.from_json(text))
    return str(caught.value).splitlines()[0]


def test_a_saved_plan_whose_orders_were_edited_is_refused() -> None:
    state, search, _ = searched("draws")
    order, boundary = schedule(search._free, 0)
    decision = search.decision_of(order, boundary)
    assert decision is not None
    joint = state.joint
    plan = replace(
        remat.plan(joint, 1).figures,
        saved=decision.saved,
        forward_order=decision.forward_order,
        backward_order=decision.backward_order,
        remat="",  # the figures are those of another plan
    )
    assert remat.plan(joint, plan=remat.Plan.from_json(plan.to_json())).forward is not None
    forward = list(plan.forward_order)
    assert "is not there" in edited(plan, joint, forward_order=forward[::-1])
    draws = [n for n in forward if n in ("native_dropout", "bernoulli", "rand")]
    assert draws == ["native_dropout", "bernoulli", "rand"]
    swapped = [n for n in forward if n != "rand"]
    swapped.insert(swapped.index("native_dropout"), "rand")
    assert "must keep their order" in edited(plan, joint, forward_order=swapped)


def test_what_writes_stays_in_forward_and_runs_once() -> None:
    state, search, _ = searched("normed")
    found = (search.decision_of(*schedule(search._free, seed)) for seed in range(30))
    decision = next(d for d in found if d is not None)
    writes = next(n for n in decision.forward_order if n.startswith("copy_"))
    twice = replace(decision, forward_order=(*decision.forward_order, writes))
    with pytest.raises(PlanError, match="effect"):
        carried_out(state, twice)
    late = replace(
        decision,
        forward_order=tuple(n for n in decision.forward_order if n != writes),
        backward_order=(writes, *decision.backward_order),
    )
    with pytest.raises(RematError, match=f"does not run '{writes}' in forward"):
        carried_out(state, late)

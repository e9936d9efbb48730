"""Models with graph breaks: one budget over all their graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetError, BudgetWarning, PlanError, ProblemError
from remat.graph.text import parse_joint, print_joint
from remat.running.measure import measure_step

#: Dynamo looks at .grad of what one graph hands to the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Broken(nn.Module):
    """Three graphs; each hands an activation to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(torch.relu(self.first(x)))).sin()
        torch._dynamo.graph_break()
        x = torch.sigmoid(self.second(torch.relu(self.second(x)))).cos()
        torch._dynamo.graph_break()
        return torch.relu(self.third(x)).sum()


@pytest.fixture(scope="module")
def step() -> tuple[Broken, torch.Tensor, list[remat.JointGraph]]:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(32, 48)
    return model, x, remat.capture(model, (x,), lower="eager", fullgraph=False)


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="remat", options={"lower": "eager", **options})


def gradients(model: nn.Module, step: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    out = step(x)
    return torch.autograd.grad(out[-1] if isinstance(out, tuple) else out, list(model.parameters()))


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0, "saved:20KiB"])
def test_graphs_share_one_budget(step, budget) -> None:
    joints = step[2]
    assert [j.received for j in joints] == [(), ((2, 0, 0),), ((2, 1, 0),)]
    plans = remat.plan(joints, budget=budget)
    assert len(plans) == 3
    assert plans.saved_bytes == sum(p.saved_bytes for p in plans) + plans.passed_bytes
    assert plans.passed_bytes in (0, 6144, 2 * 6144)
    assert plans.saved_bytes <= plans.capacity or budget == 0.0
    assert plans.recompute_cost == sum(p.recompute_cost for p in plans)
    assert "3 graphs" in plans.explain()
    same = remat.PlanSet.from_json(plans.to_json())
    assert [p.saved for p in same] == [p.saved for p in plans]
    assert same.capacity == plans.capacity


def test_sharing_is_no_worse_than_equal_shares(step) -> None:
    joints = step[2]
    together = remat.plan(joints, budget="saved:30KiB")
    apart = [
        remat.plan(j, budget=remat.Saved((30 * 1024 - together.passed_bytes) // 3)) for j in joints
    ]
    assert together.recompute_cost <= sum(p.recompute_cost for p in apart)


def test_saved_plans_are_what_torch_compile_runs_on(step, tmp_path) -> None:
    model, x, joints = step
    plans = remat.plan(joints, budget="saved:30KiB")
    path = tmp_path / "plans.json"
    path.write_text(plans.to_json())
    before = len(remat.plans())
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        got = gradients(model, compiled(model, plan=path), x)
    torch.testing.assert_close(got, gradients(model, model, x))
    used = remat.plans()[before:]
    assert sorted(p.fingerprint for p in used) == sorted(p.fingerprint for p in plans)
    assert {p.saved for p in used} == {p.saved for p in plans}


def test_a_second_graph_under_a_byte_budget_draws_a_warning(step) -> None:
    model, x, _ = step
    with pytest.warns(
        BudgetWarning, match="a second graph is compiled under the budget saved:30720B"
    ):
        compiled(model, budget="saved:30KiB")(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        compiled(model, budget=0.5)(x).backward()


def test_a_recompilation_for_other_shapes_is_no_second_graph() -> None:
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8))
    run, before = compiled(model, budget="saved:1MiB"), len(remat.plans())
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for rows in (3, 5):
            run(torch.randn(rows, 48)).sum().backward()
    assert len({p.fingerprint for p in remat.plans()[before:]}) == 2


def test_two_layers_that_share_their_code_are_two_graphs() -> None:
    layers = [nn.Sequential(nn.Linear(48, n), nn.Tanh()) for n in (16, 32)]
    run = compiled(lambda layer, x: layer(x).sin().sum(), budget="saved:1MiB")
    run(layers[0], torch.randn(3, 48)).backward()
    with pytest.warns(BudgetWarning, match="a second graph"):
        run(layers[1], torch.randn(3, 48)).backward()


class Tied(nn.Module):
    """Four graphs, the middle ones the same; the last reads the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        blocks = (
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(2)
        )
        self.first, self.second = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        torch._dynamo.graph_break()
        h = h + self.first(h)
        torch._dynamo.graph_break()
        h = h + self.second(h)
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy((h @ self.table.weight.T).flatten(0, 1), x.flatten())


@pytest.fixture(scope="module")
def tied() -> tuple[Tied, torch.Tensor, list[remat.JointGraph]]:
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(0, 50, (4, 64))
    return model, x, remat.capture(model, (x,), lower="eager", fullgraph=False)


class Equal(Tied):
    """The two equal graphs, and a third one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.first(x)
        torch._dynamo.graph_break()
        h = h + self.second(h)
        torch._dynamo.graph_break()
        return h.sum()


def test_equal_graphs_take_their_plans_in_turn() -> None:
    torch.manual_seed(0)
    model, x = Equal(), torch.randn(256, 32, requires_grad=True)
    joints = remat.capture(model, (x,), lower="eager", fullgraph=False)
    plans = remat.plan(joints, budget=remat.Peak(0.5), cost="roofline:h100")
    assert plans.has_equal_graphs
    assert plans[0].saved != plans[1].saved
    for _ in range(2):
        before = len(remat.plans())
        compiled(model, plan=plans.to_json())(x).backward()
        assert [p.saved for p in remat.plans()[before:]] == [p.saved for p in plans]


def test_a_plan_set_tells_its_peak(tied) -> None:
    joints = tied[2]
    plans = remat.plan(joints, budget=remat.Peak(0.5))
    assert not any(plan.peak_limit for plan in plans), "a ratio stands for bytes of the whole step"
    assert "peak of the step" in plans.explain()
    assert "(budget peak 0.5)" in plans.explain()
    same = remat.PlanSet.from_json(plans.to_json())
    assert (same.peak_bytes, same.budget) == (plans.peak_bytes, "peak:0.5")
    full = remat.plan(joints, budget=1.0)
    assert full.peak_bytes > plans.peak_bytes
    for share in (0.8, 0.5, 0.2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", remat.PeakWarning)
            made = remat.plan(joints, budget=share)
        assert made.peak_bytes <= full.peak_bytes or caught


def test_what_cannot_be_shared_is_refused(step) -> None:
    joints = step[2]
    with pytest.raises(PlanError, match="no graphs to plan"):
        remat.plan([], budget=0.5)
    with pytest.raises(ProblemError, match="joint is a NoneType; expected a JointGraph"):
        remat.plan([*joints, None], budget=0.5)  # type: ignore[list-item]
    with pytest.raises(BudgetError, match=r"no plans of these 3 graphs were found .* least peak"):
        remat.plan(joints, budget=remat.Peak("1KiB"))
    with pytest.raises(BudgetError, match="leave the hooks out"):
        remat.plan(joints, budget=remat.Peak(0.5), hooks="bf16")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not a saved set of plans"),
        ('{"remat_plans": 1, "capacity": 1, "passed_bytes": 0, "plans": []}', "holds no plan"),
        ('{"remat_plans": 1, "capacity": 1, "passed_bytes": 0, "plans": [1]}', "saved plan"),
    ],
)
def test_a_damaged_set_of_plans_is_refused(text: str, fault: str) -> None:
    """What else is no record, `tests/test_files.py` refuses."""
    with pytest.raises(PlanError, match=fault):
        remat.PlanSet.from_json(text)


def test_a_plan_for_other_graphs_is_refused(step) -> None:
    plans = remat.plan(step[2], budget=0.5)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(Exception, match="none of the 3 plans is for graph"):
        compiled(model, plan=plans.to_json())(torch.randn(2, 8))
    wrong = replace(plans, plans=tuple(replace(p, lower="inductor") for p in plans))
    with pytest.raises(Exception, match="made for the lowering 'inductor'") as caught:
        compiled(model, plan=wrong, budget=0.5)(torch.randn(2, 8))
    assert "give a budget" not in str(caught.value)


def test_a_budget_beside_saved_plans_is_for_graphs_without_one(step) -> None:
    model, x, joints = step
    some = remat.plan(joints[:2], budget="saved:20KiB")
    with pytest.raises(
        Exception, match=r"none of the 2 plans .* or give a budget beside the plans"
    ):
        compiled(model, plan=some)(x)
    before = len(remat.plans())
    got = gradients(model, compiled(model, plan=some, budget=0.5), x)
    torch.testing.assert_close(got, gradients(model, model, x))
    used = {p.fingerprint: p.budget for p in remat.plans()[before:]}
    assert [used[j.fingerprint] for j in joints] == ["saved:20480B", "saved:20480B", "0.5"]


def test_options_that_are_no_dict_are_refused() -> None:
    torch._dynamo.reset()
    run = torch.compile(nn.Linear(2, 2), backend="remat", options=[0.3])  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"options is \[0.3\]; expected a dict of options by name"):
        run(torch.randn(2, 2))


class Step(nn.Module):
    """A step of a few square layers."""

    count = 3

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(self.count))


class Held(Step):
    """Hands on what nobody saves; the frames of the model hold it to the end of forward."""

    count = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[0](x)
        torch._dynamo.graph_break()
        x = x + 1.0
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x.abs().mean(-1).sum()


class Returned(Step):
    """Returns what later graphs receive, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.inner[0](x).tanh()
        torch._dynamo.graph_break()
        second = self.inner[1](first).sin()
        torch._dynamo.graph_break()
        return first, second, self.inner[2](second).exp().sum()


class Wide(Step):
    """Its peak lies elsewhere under other plans."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[0](x).tanh().to(torch.bfloat16)
        torch._dynamo.graph_break()
        x = self.inner[1](x.float()).sin().to(torch.float64)
        torch._dynamo.graph_break()
        return self.inner[2](x.float()).exp().mean()


class Torn(nn.Module):
    """A layer of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.inner(x)).sin()
        torch._dynamo.graph_break()
        return x + self.outer(h).tanh()


class Head(nn.Module):
    """A graph of its own: Dynamo leaves out the frame of the loop around the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).exp().sum()


class Turns(nn.Module):
    """Two graphs that run in turn."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "runs", "reads_shared"),
    [
        (Tied, [1, 1, 1, 1], [False, False, False, True]),
        (Held, [1, 1, 1, 1], [False, False, False, False]),
        (Returned, [1, 1, 1], [False, False, False]),
        (Wide, [1, 1, 1], [False, False, False]),
        (lambda: Turns([Torn() for _ in range(3)]), [1, 1, 2, 2, 1], None),
        (lambda: Turns([Torn()] * 3), [1, 1, 2, 2, 1], None),
    ],
    ids=["tied", "held", "returned", "wide", "equal layers", "one layer"],
)
def test_one_peak_holds_over_all_graphs(
    make: Callable[[], nn.Module], runs: list[int], reads_shared: list[bool] | None
) -> None:
    """The simulated peak of the whole step is what was measured, and falls with the share."""
    torch.manual_seed(0)
    model = make()
    x = torch.randint(0, 50, (4, 64)) if isinstance(model, Tied) else torch.randn(128, 32)
    joints = remat.capture(model, (x,), lower="eager", fullgraph=False)
    assert [j.runs for j in joints] == runs
    assert reads_shared in (None, [bool(j.shared) for j in joints])
    expected, figures = gradients(model, model, x), []
    for share in (0.0, 1.0):
        read = [parse_joint(print_joint(j)) for j in joints]
        # A CPU's costs count what operators allocate inside, which storages do not show.
        plans = remat.plan(read, remat.Peak(share), cost="roofline:h100")
        run = compiled(model, plan=plans)
        assert measure_step(run, (x,), by="storages").peak_bytes == plans.peak_bytes
        torch.testing.assert_close(gradients(model, run, x), expected)
        figures.append((plans.peak_bytes, -plans.recompute_cost))
    assert figures == sorted(figures)
    (least, _), (full, _) = figures
    assert full <= plans.without_peak_bytes, "a cheaper plan may have a lower peak"
    assert least < full or isinstance(model, Held)
    between = (least + full) // 2
    assert remat.plan(joints, remat.Peak(between), cost="roofline:h100").peak_bytes <= between


@pytest.fixture(scope="module")
def in_turn() -> list[remat.JointGraph]:
    args = (torch.randn(16, 32),)
    return remat.capture(Turns([Torn()] * 3), args, lower="eager", fullgraph=False)


def test_a_graph_that_runs_several_times_counts_as_often(in_turn) -> None:
    assert [j.runs for j in in_turn] == [1, 1, 2, 2, 1]
    full = remat.plan(in_turn, budget=1.0)
    each = [p.saved_bytes * j.runs for p, j in zip(full, in_turn, strict=True)]
    assert full.saved_bytes == sum(each) + full.passed_bytes
    half = remat.plan(in_turn, budget=remat.Saved(full.saved_bytes // 2))
    assert half.saved_bytes <= full.saved_bytes // 2
    assert remat.PlanSet.from_json(half.to_json()).saved_bytes == half.saved_bytes


def test_runs_that_are_not_there_are_refused(in_turn) -> None:
    unordered = [replace(joint, turns=()) for joint in in_turn]
    with pytest.raises(PlanError, match="runs 2 times in a step, and does not say in which order"):
        remat.plan(unordered, budget=remat.Peak(0.5))
    with pytest.raises(PlanError, match="receives an output that no earlier run makes"):
        remat.plan([replace(j, received=(), shared=()) for j in in_turn[1:]], budget=0.5)


def test_graphs_out_of_order_are_refused(tied) -> None:
    joints = tied[2]
    with pytest.raises(PlanError, match="does not come before it"):
        remat.plan(joints[::-1], budget=0.5)
    with pytest.raises(PlanError, match="all graphs of one step"):
        remat.plan(joints[1:], budget=0.5)


def test_room_for_the_cheapest_plans_is_no_reason_to_wait_for_copies() -> None:
    """A product tagged for the host is not saved if its readers' results may be: no copy is waited for."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ w)
        torch._dynamo.graph_break()
        with remat.region("offload"):
            y = x @ w
        return (torch.sin(y) * torch.tanh(y)).sum()

    args = (torch.randn(256, 64), torch.randn(64, 64, requires_grad=True))
    joints = remat.capture(step, args, fullgraph=False, lower="eager")
    plans = remat.plan(joints, "1GiB", cost="roofline:h100")
    assert sum(p.recompute_cost + p.exposed_time for p in plans) == 0


def test_a_saved_plan_fits_a_graph_that_gets_part_of_a_tensor() -> None:
    """At capture, the whole storage of the part counts; where Inductor compiles the graph, its own bytes alone do."""

    def step(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1)
        torch._dynamo.graph_break()
        return torch.relu(left.cos()) @ left.mT + right.sum()

    x = torch.randn(16, 10, requires_grad=True)
    plans = remat.plan(remat.capture(step, (x,), fullgraph=False, run=True), remat.Saved("1MiB"))
    torch._dynamo.reset()
    run = torch.compile(step, backend="remat", options={"plan": plans})
    (found,) = torch.autograd.grad(run(x).sum(), x)
    (wanted,) = torch.autograd.grad(step(x).sum(), x)
    torch.testing.assert_close(found, wanted)

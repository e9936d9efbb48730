"""`remat.whole_graph` and `remat.rematerialize`: a step that is one graph computes the same within a peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.errors import BudgetError, PlanError, ProblemError
from remat.graph.text import parse_joint, print_joint
from remat.graph.whole_graph import curve_of_one, joined, whole_graph
from tests import whole_steps

LAYERS = 4
#: PyTorch 2.11 does not mark the nodes that autograd traces in backward.
marks = pytest.mark.skipif(
    not hasattr(torch.fx.traceback, "_set_autograd_backward"),
    reason="2.11 marks no node of backward",
)
X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def model(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 32))
        for _ in range(LAYERS)
    )
    return nn.Sequential(*blocks)


def traced(step: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    return make_fx(step, tracing_mode="fake")(*inputs)  # type: ignore[no-any-return]


def training(net: nn.Module) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function of parameters and batch that returns loss and gradients, and the parameters."""
    names = [name for name, _ in net.named_parameters()]

    def step(parameters: list[torch.Tensor], x: torch.Tensor) -> Any:
        given = dict(zip(names, parameters, strict=True))
        loss = torch.func.functional_call(net, given, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        return loss, gradients

    return step, [p.detach().requires_grad_() for p in net.parameters()]


def results(gm: fx.GraphModule, *inputs: Any) -> list[torch.Tensor]:
    """What a graph returns, and its inputs afterwards."""
    given = copy.deepcopy(inputs)
    torch.manual_seed(1)
    with torch.no_grad():
        made = gm(*given)
    return [*torch.utils._pytree.tree_leaves((made, given)), torch.rand(1)]


@pytest.mark.parametrize("place", [0.75, 0.25, 0.0])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_training_step_computes_the_same_within_a_lower_peak(
    place: float, dropout: float
) -> None:
    step, parameters = training(model(dropout=dropout))
    gm = traced(step, parameters, X)
    made = remat.rematerialize(gm, remat.Peak(place))
    plan = made.meta["remat"]
    assert plan.recompute_cost > 0
    assert curve_of_one(made).peak_bytes <= plan.peak_bytes < curve_of_one(gm).peak_bytes
    before, after = results(gm, parameters, X), results(made, parameters, X)
    assert all(map(torch.equal, before, after))


@marks
def test_writes_of_inputs_come_behind_the_last_reader_and_free_gradients_early() -> None:
    net = model(dropout=0.25)
    parameters = [*net.parameters()]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        return loss.detach()

    gm, inputs = whole_steps.traced(step, {"x": X})
    made = remat.rematerialize(gm, remat.Peak(0.5))
    assert not any(n.name.endswith("_written") for n in made.graph.nodes)
    (before, most), (after, least) = (whole_steps.run(g, inputs) for g in (gm, made))
    assert all(map(torch.equal, before, after))
    assert least <= made.meta["remat"].peak_bytes < most
    nodes = [n.target for n in made.graph.nodes]
    first = nodes.index(torch.ops.aten.copy_.default)
    last = len(nodes) - 1 - nodes[::-1].index(torch.ops.aten.mm.default)
    assert first < last, "the last layer is updated before the first layer has its gradient"


def skipping(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """An inference that adds its first values, which are wide, to its last."""
    kept = [torch.cat([x * k] * 8) for k in range(6)]
    for weight in weights:
        x = torch.tanh(x @ weight)
    for value in kept:
        x = x + value.sum() * value[: len(x)]
    return x


def test_an_inference_is_planned_at_the_node_with_most_bytes() -> None:
    weights = [torch.eye(32) * 0.5 for _ in range(4)]
    gm = traced(skipping, X, weights)
    most = curve_of_one(gm).peak_bytes
    made = remat.rematerialize(gm, most // 2)
    assert curve_of_one(made).peak_bytes <= most // 2
    assert made.meta["remat"].recompute_cost > 0
    assert all(map(torch.equal, results(gm, X, weights), results(made, X, weights)))


def test_a_peak_that_no_plan_holds_is_refused_with_the_least() -> None:
    gm = traced(skipping, X, [torch.eye(32)])
    with pytest.raises(BudgetError, match="The least peak of any plan found is"):
        remat.rematerialize(gm, 2000)


def test_constants_and_inputs_are_returned_in_their_places() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x.sin()
        return y, x, None, y.cos(), y

    gm = traced(step, X)
    made = remat.rematerialize(gm, remat.Peak(0.0))
    assert made(X)[2] is None
    for a, b in zip(made(X), gm(X), strict=True):
        assert a is b or torch.equal(a, b)


@pytest.mark.parametrize(
    "shape", [lambda y: y, lambda y: [y], lambda y: {"a": y, "b": [y.cos(), None, 3]}]
)
def test_outputs_keep_their_structure(shape: Callable[[torch.Tensor], Any]) -> None:
    gm = traced(lambda x: shape(x.sin()), X)
    made = remat.rematerialize(gm, remat.Peak(0.0))
    (before, tree), (after, same) = map(torch.utils._pytree.tree_flatten, (gm(X), made(X)))
    assert tree == same
    assert all(
        torch.equal(a, b) if a is not None else b is None
        for a, b in zip(before[:2], after[:2], strict=True)
    )


def test_batch_norm_updates_its_statistics_once_though_its_schema_names_no_write() -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 32))
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    names = [name for name, _ in net.named_parameters()]

    def step(
        parameters: list[torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor
    ) -> Any:
        given = dict(zip(names, parameters, strict=True)) | buffers
        loss = torch.func.functional_call(net, given, (x,)).square().mean()
        return loss, torch.autograd.grad(loss, parameters)

    parameters = [p.detach().requires_grad_() for p in net.parameters()]
    gm = traced(step, parameters, buffers, X)
    made = remat.rematerialize(gm, remat.Peak(0.0))
    assert made.meta["remat"].recompute_cost > 0
    before, after = (results(g, parameters, buffers, X) for g in (gm, made))
    assert all(map(torch.equal, before, after))


def marked(step: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """Trace a step whose nodes of backward have the mark of AOTAutograd, without functionalisation."""
    grad = torch.autograd.grad

    def marking(*args: Any, **kwargs: Any) -> Any:
        with torch.fx.traceback._set_autograd_backward():
            return grad(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.fx.traceback.preserve_node_meta():
        patch.setattr(torch.autograd, "grad", marking)
        return traced(step, *inputs)


def test_a_write_does_not_move_past_a_read_of_the_same_memory_through_another_input() -> None:
    def step(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        wide = [torch.cat([x * k] * 8) @ b.t() for k in range(5)]
        total = sum(w.sin().sum() for w in wide)
        doubled = a * 2
        for _ in range(4):
            x = torch.tanh(x @ a)
        for w in wide:
            x = x + w[:64].cos().sum() * w[:64]
        a.copy_(doubled)
        return x.sum(), total

    both = torch.rand(64, 32, generator=torch.Generator().manual_seed(0))
    inputs = both[:32], both[16:48], X
    gm = traced(step, *inputs)
    made = remat.rematerialize(gm, remat.Peak(0.0))
    assert all(map(torch.equal, results(gm, *inputs), results(made, *inputs)))


@marks
def test_a_read_stays_behind_the_write_of_a_part_of_its_memory() -> None:
    def step(parameters: list[torch.Tensor], state: torch.Tensor, x: torch.Tensor) -> Any:
        for p in parameters:
            x = torch.tanh(nn.functional.gelu(x @ p))
        loss = x.square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            state[:8].copy_(gradients[0][:8])
            state[8:].add_(1.0)
            total = state.sum()
            parameters[0].copy_(state)
        return loss, total

    parameters = [torch.eye(32).mul_(0.5).requires_grad_() for _ in range(3)]
    inputs = parameters, torch.ones(32, 32), X
    gm = marked(step, *inputs)
    made = remat.rematerialize(gm, remat.Peak(0.25))
    assert made.meta["remat"].recompute_cost > 0
    assert all(map(torch.equal, results(gm, *inputs), results(made, *inputs)))


def test_equal_calls_are_not_merged_if_the_result_of_one_is_overwritten() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.cat([x, x]), torch.cat([x, x])
        second[:8].mul_(0.5)
        return first.sum() - second.sum()

    gm = traced(step, X + 2)
    assert torch.equal(gm(X + 2), remat.rematerialize(gm, remat.Peak(0.0))(X + 2))


@marks
def test_random_numbers_behind_the_first_backward_belong_to_a_second_forward() -> None:
    def step(parameters: list[torch.Tensor], batches: list[torch.Tensor]) -> Any:
        losses, sums = [], []
        for x in batches:
            for p in parameters:
                x = torch.tanh(nn.functional.dropout(nn.functional.gelu(x @ p), 0.1))
            losses.append(x.square().mean())
            sums.append(torch.autograd.grad(losses[-1], parameters))
        return losses, [a + b for a, b in zip(*sums, strict=True)]

    parameters = [torch.eye(32).mul_(0.5).requires_grad_() for _ in range(3)]
    inputs = parameters, [X, X * 2]
    gm = marked(step, *inputs)
    made = remat.rematerialize(gm, remat.Peak(0.25))
    assert all(map(torch.equal, results(gm, *inputs), results(made, *inputs)))


def test_the_curve_of_a_graph_whose_nodes_run_three_times_is_that_of_its_plan() -> None:
    def step(parameters: list[torch.Tensor], x: torch.Tensor) -> Any:
        for p in parameters:
            x = torch.tanh(nn.functional.gelu(x @ p) @ p.t())
        losses = x.square().mean(), x.sin().sum()
        first = torch.autograd.grad(losses[0], parameters, retain_graph=True)
        return losses, first, torch.autograd.grad(losses[1], parameters)

    parameters = [torch.eye(32).mul_(0.5).requires_grad_() for _ in range(4)]
    gm = traced(step, parameters, X)
    made = remat.rematerialize(gm, remat.Peak(0.0))
    assert sum("_again" in n.name for n in made.graph.nodes) > len(gm.graph.nodes) // 4
    assert curve_of_one(made).peak_bytes <= made.meta["remat"].peak_bytes


def test_the_text_of_a_whole_step_can_be_planned_and_joined() -> None:
    step, parameters = training(model())
    gm = traced(step, parameters, X)
    joint = parse_joint(print_joint(whole_graph(gm)))
    plan = remat.plan(joint, remat.Peak(0.25))
    made = joined(joint, plan.forward, plan.backward)
    before, after = results(gm, parameters, X), made(*parameters, X)
    assert all(map(torch.equal, before, torch.utils._pytree.tree_leaves(after)))


def test_a_pipeline_ends_with_one_graph() -> None:
    step, parameters = training(model())
    gm = traced(step, parameters, X)
    passes = "dce,cse,min-cut,partition,reorder-backward,join"
    done = remat.PassManager.parse(passes).run(whole_graph(gm))
    before, after = results(gm, parameters, X), done.graph_module(parameters, X)
    assert all(map(torch.equal, before, torch.utils._pytree.tree_leaves(after)))
    with pytest.raises(PlanError, match="'Linear' is a joint graph of AOTAutograd"):
        remat.PassManager.parse("partition,join").run(remat.capture(nn.Linear(32, 32), (X,)))


def test_a_plan_takes_no_pipeline_that_joins() -> None:
    gm = traced(lambda x: x.sin().cos(), X)
    with pytest.raises(ProblemError, match="leave out 'join'"):
        remat.rematerialize(gm, pipeline="dce,min-cut,partition,join")


def test_a_compiler_takes_it_as_a_pass_with_example_inputs() -> None:
    step, parameters = training(model())
    gm = traced(step, parameters, X)
    made = remat.graph_pass(remat.Peak(0.25))(gm, [*parameters, X])
    assert made.meta["remat"].peak_bytes == remat.plan(whole_graph(gm), remat.Peak(0.25)).peak_bytes
    with pytest.raises(BudgetError, match="nonsense"):
        remat.graph_pass("nonsense")


def test_a_joint_graph_of_autograd_is_a_whole_step_with_tangents_as_inputs() -> None:
    net = model()
    joint = remat.capture(net, (X,), lower="eager")
    made = remat.rematerialize(joint.graph_module, remat.Peak(0.25))
    assert [n.name for n in made.graph.find_nodes(op="placeholder")] == [
        n.name for n in joint.graph.find_nodes(op="placeholder")
    ]
    inputs = [torch.rand(n.meta["val"].shape) for n in joint.graph.find_nodes(op="placeholder")]
    before, after = (whole_steps.run(g, inputs) for g in (joint.graph_module, made))
    assert all(map(torch.equal, before[0], after[0]))
    assert after[1] < before[1]


def test_a_tag_that_forbids_recomputation_holds() -> None:
    step, parameters = training(model())
    gm = traced(step, parameters, X)
    gelu = next(n for n in gm.graph.nodes if "gelu" in n.name)
    gelu.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    made = remat.rematerialize(gm, remat.Peak(0.2))
    again = {n.name for n in made.graph.nodes if n.name.endswith("_again")}
    assert again
    assert f"{gelu.name}_again" not in again


@pytest.mark.parametrize(
    ("gm", "expected"),
    [
        (nn.Linear(2, 2), "expected a torch.fx.GraphModule"),
        (fx.symbolic_trace(nn.Sequential(nn.ReLU())), "is a call_module; expected a graph of ATen"),
        (fx.symbolic_trace(lambda x: torch.sin(x)), "has no fake value"),
        (traced(lambda x: x, X), "runs no operator"),
    ],
)
def test_what_is_no_graph_of_a_step_is_refused(gm: Any, expected: str) -> None:
    with pytest.raises(ProblemError, match=expected):
        remat.rematerialize(gm)

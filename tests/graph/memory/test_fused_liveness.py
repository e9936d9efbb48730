"""What fused code is expected to take, against counting by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import remat
from remat import torch_compat
from remat.graph.memory.fused_liveness import FusedWalk
from remat.graph.memory.liveness import StepWalk
from remat.running.workspace import workspace_bytes
from tests.graphs import joint_of, weight


def walk_of(plan: remat.Plan) -> FusedWalk:
    return FusedWalk(plan.forward, plan.backward, 1, None)


def written(walk: StepWalk) -> set[str]:
    """Names of the nodes whose results are written to memory."""
    return {node.name for _, node, *_ in walk.lifetimes()}


def test_a_chain_of_pointwise_operators_is_one_kernel() -> None:
    """x and its gradient (4 KiB each), the sum and the tangent (4 bytes each): nothing else is written."""
    joint = joint_of(lambda x: (x * 2).neg().abs().sum(), weight(32, 32))
    plan = remat.plan(joint, 0.0)
    assert plan.estimated_peak_bytes == 2 * 4096 + 2 * 4
    assert plan.peak_bytes > plan.estimated_peak_bytes


def test_products_take_what_they_take() -> None:
    joint = joint_of(lambda x, w: (x @ w) @ w, weight(16, 16), weight(16, 16))
    plan = remat.plan(joint, 1)
    # The sum of the two gradients of w is computed with the product that makes one of them.
    assert plan.peak_bytes - 1024 <= plan.estimated_peak_bytes <= plan.peak_bytes


def test_a_kernel_writes_where_an_input_ends() -> None:
    """At the last product: x, w, the sum, a gradient written over the product, those of w and of x."""
    joint = joint_of(lambda x, w: (x @ w).sin().sum(), weight(32, 32), weight(32, 512))
    plan = remat.plan(joint, 0.0)
    assert plan.estimated_peak_bytes == 4096 + 65536 + 4 + 65536 + 65536 + 4096


def test_the_last_kernel_of_forward_writes_where_an_input_ends() -> None:
    """At the end of forward: x, w, the exponential written over the product, and the loss."""
    joint = joint_of(lambda x, w: (x @ w).exp().sum(), weight(32, 32), weight(32, 512))
    walk = walk_of(remat.plan(joint, 1.0))
    assert walk.alive()[walk.boundary - 1] == 4096 + 65536 + 65536 + 4


def test_a_kernel_writes_over_a_saved_value_that_it_reads_through_a_view() -> None:
    """Backward's kernel reads the product, and writes its result of 64 KiB over the product."""
    value, aten = torch.empty(128, 128, device="meta"), torch.ops.aten
    forward, backward = fx.Graph(), fx.Graph()
    product = forward.call_function(aten.mm.default)
    forward.output((product,))
    saved = backward.placeholder("product")
    view = backward.call_function(aten.view.default, (saved, [-1]))
    result = backward.call_function(aten.sin.default, (view,))
    last = backward.call_function(aten.mm.default, (result,))
    backward.output((last,))
    for node in (product, saved, view, result, last):
        node.meta["val"] = value if node in (product, saved) else torch.empty_like(value)
    view.meta["val"] = value.view(-1)
    walk = FusedWalk(fx.GraphModule({}, forward), fx.GraphModule({}, backward), 0, None)
    assert walk.alive() == (65536, 65536, 65536, 2 * 65536)


@pytest.mark.parametrize("dependent", [False, True])
def test_the_last_of_several_results_is_written_over_an_input_if_it_depends_on_the_others(
    dependent: bool,
) -> None:
    """The product and two results, each of 64 KiB. Of two independent results, both may still read the product."""
    forward, backward = fx.Graph(), fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        node = forward.call_function(target, args)
        node.meta["val"] = torch.empty(128, 128, device="meta")
        return node

    aten = torch.ops.aten
    product = call(aten.mm.default)
    first = call(aten.tanh.default, product)
    last = call(aten.mul.Tensor, product, first if dependent else product)
    forward.output((first, last, call(aten.mm.default, last)))
    backward.output(())
    walk = FusedWalk(fx.GraphModule({}, forward), fx.GraphModule({}, backward), 3, None)
    assert walk.alive()[2] == (2 if dependent else 3) * 65536


def test_long_chains_and_many_paths_are_looked_at_once() -> None:
    forward, backward = fx.Graph(), fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        node = forward.call_function(target, args)
        node.meta["val"] = torch.empty(4, 4, device="meta")
        return node

    aten = torch.ops.aten
    product = last = call(aten.mm.default)
    for _ in range(1100):
        last = call(aten.add.Tensor, last, 1)
    chain = {n.name for n in forward.nodes} - {product.name, last.name}
    for _ in range(40):
        last = call(aten.add.Tensor, call(aten.sin.default, last), call(aten.cos.default, last))
    forward.output((last,))
    backward.output(())
    walk = FusedWalk(fx.GraphModule({}, forward), fx.GraphModule({}, backward), 1, None)
    assert {product.name, last.name} <= written(walk)
    assert chain.isdisjoint(written(walk))


def test_a_value_is_written_where_an_input_ends_that_one_result_reads() -> None:
    """Forward's product and its gradient are read for the last time; each of two results is made of both."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((x @ w).square() @ v).sum()

    joint = joint_of(f, weight(64, 64), weight(64, 64), weight(64, 64))
    plan = remat.plan(joint, 0.0)
    compiled = 64 * 64 * 4 * 7  # x, w, v; the product, its square, the gradients of both
    assert abs(plan.estimated_peak_bytes - compiled) <= 64 * 64 * 4


@pytest.mark.parametrize("shape", [(2, 4, 32), (2, 4, 8, 8), (2, 4, 6, 6, 6)])
def test_workspaces_are_measured_in_the_layouts_of_compiled_code(shape: tuple[int, ...]) -> None:
    """Forward reads channels-last copies of images. Before 2.15, backward reads the step's input, which is contiguous."""
    dims = len(shape) - 2
    convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    x, w = weight(*shape), weight(8, 4, *(3,) * dims)
    plan = remat.plan(
        remat.capture(lambda x, w: convolution(x, w).sum(), (x, w), lower="inductor"), 1
    )
    backward = next(n for n in plan.backward.graph.nodes if n.name == "convolution_backward")
    gradient = torch.ones_like(convolution(x, w))
    if dims == 2:
        copies = [v.detach().contiguous(memory_format=torch.channels_last) for v in (x, w)]
    else:
        copies = [x.detach(), w.detach()]
    aten, more = torch.ops.aten, ([1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1)
    forward = workspace_bytes(aten.convolution.default, (*copies, None, *more), {}, gradient)
    expanded = gradient.new_ones(()).expand(gradient.shape)
    read = [x.detach(), w.detach()] if torch_compat.is_before("2.15") else copies
    args = (expanded, *read, *backward.args[3:])
    taken = workspace_bytes(aten.convolution_backward.default, args, {}, (x, w))
    copied = [v.nbytes for v in (x, w, w) if not read[0].is_contiguous()]  # and the gradient of w
    assert taken > 0
    assert not forward or forward in workspaces(plan, "convolution")
    assert workspaces(plan, "convolution_backward") == [taken, *copied]


def test_a_plan_for_another_device_counts_no_workspace_of_this_one() -> None:
    joint = remat.capture(
        lambda x, w: torch.conv2d(x, w).sum(),
        (weight(1, 4, 8, 8), weight(8, 4, 3, 3)),
        lower="inductor",
    )
    measured, *_ = workspaces(remat.plan(joint, 1), "convolution_backward")
    other = remat.plan(joint, 1, cost="roofline:h100")
    assert measured not in workspaces(other, "convolution_backward")


def test_each_convolution_has_its_own_copy_of_an_input() -> None:
    """Inductor lays the input out anew for each, and both copies are made before the first runs."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w).sum() * torch.nn.functional.conv2d(x, v).sum()

    image = torch.randn(1, 4, 8, 8)
    joint = joint_of(f, image, weight(8, 4, 3, 3), weight(8, 4, 3, 3))
    plan = remat.plan(joint, 1)
    walk = walk_of(plan)
    forward = [
        (first, last)
        for _, nbytes, first, last in walk.workspaces()
        if nbytes == image.nbytes and last < walk.boundary
    ]
    assert len(forward) == 2
    (first, one), (again, other) = sorted(forward)
    assert first == again == one < other


def test_who_writes_into_a_copy_of_zeros_fills_it() -> None:
    """Two operators put rows into zeros, which themselves are nowhere: only both results are."""

    def f(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        zeros, x = torch.zeros(512, 32), x @ w
        first = zeros.index_put((rows,), x)
        return first.t() @ zeros.index_put((rows + 16,), x.sin())

    args = (weight(16, 32), weight(32, 32), torch.arange(16))
    plan = remat.plan(remat.capture(f, args, lower="inductor"), 1)
    fused = written(walk_of(plan))
    assert "full_default" in written(StepWalk(plan.forward, plan.backward, 1, None)) - fused
    assert {"index_put", "index_put_1"} <= fused


def test_what_reads_the_same_value_is_one_kernel_with_what_reads_it_first() -> None:
    """The first product is doubled, and added to three times the second: it ends where both run at once."""

    def f(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        first = x @ w
        second = first @ u
        third = (first * 2) @ u
        return third + (first + second * 3) @ u

    joint = joint_of(f, weight(16, 16), weight(16, 16), torch.ones(16, 16))
    walk = walk_of(remat.plan(joint, 1))
    lives = {node.name: (first, last) for _, node, _, first, last in walk.lifetimes()}
    runs = {node.name: program_point for program_point, node in walk.running()}
    assert lives["mm"][1] < runs["mm_2"]
    assert lives["add"][0] <= runs["mm_2"]


def test_what_a_kernel_keeps_in_registers_is_no_place_to_write() -> None:
    """The product, its gradient, GELU's result (64 KiB each); x (8 KiB), both weights (32 KiB each)."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x @ w) @ v).square().sum()

    args = (weight(64, 32), weight(32, 256), weight(256, 32))
    plan = remat.plan(remat.capture(f, args, lower="inductor"), 1, "lagrangian")
    assert plan.estimated_peak_bytes == (3 * 64 + 8 + 2 * 32) * 1024


def test_what_one_operator_reads_is_never_written_however_much_it_reads() -> None:
    """The sum of five products has one reader, so it is that one, which has two readers, that is written."""

    def f(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        total = (x @ w[0]) * 2
        for k in range(1, 5):
            total = total + (x @ w[k]) * 2
        total = total.neg()
        first = (total * 2) @ u
        return (total + first * 3) @ u

    plan = remat.plan(joint_of(f, weight(16, 16), weight(5, 16, 16), torch.ones(16, 16)), 1)
    assert "neg" in written(walk_of(plan))
    assert "add_3" not in written(walk_of(plan))


def test_a_read_by_index_is_never_written_either() -> None:
    """Of what is interpolated, 64 KiB, only the cosine is written, which is kept: no second 64 KiB beside it."""

    def f(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._unsafe_index(x, [index]).sin().sum()

    x, index = weight(64, 64), torch.arange(256) // 4
    plan = remat.plan(joint_of(f, x, index), 1.0, "lagrangian")
    assert "cos" in plan.saved
    assert written(walk_of(plan)).isdisjoint({"_unsafe_index", "sin"})


def test_a_value_that_is_read_several_times_counts_once() -> None:
    """The sum has two readers but reads only one value, so that both of their kernels compute it."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = x @ w
        total = product * 2 + product * 3 + product * 4 + product * 5 + product * 6
        return (total * 2) @ w + (total * 3) @ w

    walk = walk_of(remat.plan(joint_of(f, weight(16, 16), torch.ones(16, 16)), 1))
    assert {"mm", "mul_5", "mul_6"} <= written(walk)
    assert "add_3" not in written(walk)


def workspaces(plan: remat.Plan, name: str) -> list[int]:
    return [nbytes for node, nbytes, *_ in walk_of(plan).workspaces() if node.name == name]


def test_a_scattered_result_is_alive_beside_what_the_same_call_computes_of_it() -> None:
    """One C++ function has a loop for each, and nothing overwrites a result that is written in place."""

    def f(x: torch.Tensor, at: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.zeros(4, 64).scatter_add(1, at, x.sin()) * 2.0
        return (made @ w).sum(), made.tan()

    args = weight(4, 16), torch.randint(64, (4, 16)), weight(64, 64)
    plan = remat.plan(remat.capture(f, args, lower="inductor"), 1.0)
    ends = {node.name: (first, last) for _, node, _, first, last in walk_of(plan).storages()}
    (first, last), (doubled, _), (later, _) = ends["scatter_add"], ends["mul"], ends["tan"]
    assert first == last == doubled == later


def test_the_kernel_before_a_convolution_makes_its_copy_of_an_input() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.conv2d(x, w, padding=1).sin()
        return torch.nn.functional.conv2d(made, v, padding=1).sum()

    args = weight(2, 4, 8, 8), weight(4, 4, 3, 3), weight(6, 4, 3, 3)
    walk = walk_of(remat.plan(joint_of(f, *args), 1.0))
    program_points = {
        node.name: program_point
        for program_point, node in walk.running()
        if program_point < walk.boundary
    }
    copies = [taken[1:] for taken in walk.workspaces() if taken[0].name == "convolution_1"]
    assert (args[2].nbytes, program_points["sin"], program_points["convolution_1"]) in copies


@pytest.mark.parametrize("joined", [False, True])
def test_a_backward_convolution_with_a_contiguous_input_copies_what_it_reads(joined: bool) -> None:
    """What is concatenated again is contiguous before 2.15, and what forward saved is not."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.conv2d(x, w, padding=1)
        both = torch.cat([made, made.sin()], 1) if joined else made.sin()
        return torch.nn.functional.conv2d(both.exp(), v[:, : both.shape[1]], padding=1).sum()

    args = torch.randn(2, 4, 8, 8), weight(4, 4, 3, 3), weight(6, 8, 3, 3)
    plan = remat.plan(remat.capture(f, args, lower="inductor"), 0.5)
    assert "convolution" in plan.saved
    channels = 8 if joined else 4
    is_read_as_made = joined and torch_compat.is_before("2.15")
    layout = torch.contiguous_format if is_read_as_made else torch.channels_last
    image, kernel = (
        torch.zeros(shape).contiguous(memory_format=layout)
        for shape in ((2, channels, 8, 8), (6, channels, 3, 3))
    )
    gradient = torch.ones(()).expand(2, 6, 8, 8)
    node = next(n for n in plan.backward.graph.nodes if n.name == "convolution_backward")
    taken = workspace_bytes(node.target, (gradient, image, kernel, *node.args[3:]), {}, ())
    assert taken in workspaces(plan, "convolution_backward")


def test_a_channels_last_copy_of_a_reshaped_gradient_is_made_by_its_kernel() -> None:
    """The gradient has two dimensions and is viewed as images; a product runs before they are read."""

    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.conv2d(x, w, padding=1)
        images = torch.nn.functional.conv2d(made.exp(), w, padding=1)
        return images.reshape(2, -1).sin().sum() + (a @ a).sin().sum()

    plan = remat.plan(joint_of(f, torch.randn(2, 4, 8, 8), weight(4, 4, 3, 3), weight(8, 8)), 1.0)
    nodes = {n.name: n for n in plan.backward.graph.nodes}
    product = next(n for n in nodes.values() if n.target is torch.ops.aten.mm.default)
    viewed = next(n for n in nodes.values() if "convolution_backward" in n.name).args[0]
    gradient = viewed.all_input_nodes[0]
    before = walk_of(plan)
    for node in (*(n for n in gradient.all_input_nodes if n.op == "call_function"), gradient):
        product.prepend(node)
    after = walk_of(plan)
    for walk, until in ((before, "convolution_backward"), (after, product.name)):
        program_points = {node.name: program_point for program_point, node in walk.running()}
        copies = [taken for taken in walk.workspaces() if taken[1] == 2 * 4 * 8 * 8 * 4]
        assert (program_points[until] - 1,) * 2 in [(first, last) for *_, first, last in copies]


@pytest.mark.parametrize("residual", [False, True])
def test_a_gradient_with_other_readers_is_alive_beside_its_channels_last_copy(
    residual: bool,
) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.conv2d(x, w, padding=1)
        images = torch.nn.functional.conv2d(made.sin(), w, padding=1)
        return ((made + images) if residual else images).square().sum()

    walk = walk_of(remat.plan(joint_of(f, torch.randn(2, 4, 8, 8), weight(4, 4, 3, 3)), 1.0))
    first = min(m for m, n in walk.running() if n.name == "convolution_backward")
    nbytes = 2 * 4 * 8 * 8 * 4
    copies = [taken[1:] for taken in walk.workspaces() if taken[0].name == "convolution_backward"]
    assert ((nbytes, first - 1, first) in copies) is residual


def test_experts_one_row_at_a_time_are_neither_gathered_nor_scattered_in_memory() -> None:
    """Each row has its own weight. Neither these weights nor their gradients are written."""

    def f(x: torch.Tensor, experts: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return (experts[chosen] @ x[..., None]).sin().sum()

    args = torch.randn(32, 16), weight(4, 16, 16), torch.arange(32) % 4
    plan = remat.plan(remat.capture(f, args, lower="inductor"), 0.0)
    fused, plain = walk_of(plan), StepWalk(plan.forward, plan.backward, 1, None)
    gathered = {
        node.name for _, node, nbytes, *_ in plain.lifetimes() if nbytes == 32 * 16 * 16 * 4
    }
    assert gathered
    assert written(fused).isdisjoint(gathered)


def test_formats_of_many_paths_are_found_in_one_pass() -> None:
    """With one search for each path, 2**40 of them would never end."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x + x.sin()
        return torch.nn.functional.conv2d(x, w, padding=1).sum()

    joint = joint_of(f, weight(2, 4, 8, 8), weight(4, 4, 3, 3))
    plan = remat.plan(joint, 0.0)
    assert [node.name for node in walk_of(plan)._contiguous()] == ["convolution_backward"]

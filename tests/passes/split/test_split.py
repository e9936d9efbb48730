"""Golden tests of the two halves: node for node, as small programs should be split."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import remat
from remat.errors import PlanError
from remat.graph.joint import output_node
from remat.graph.problems.lowering import Decision
from remat.passes.core.state import State
from remat.passes.split.partition import Partition
from remat.passes.split.reorder_backward import reorder
from tests.graphs import calls, joint_of, node, placeholders, weight


def returned(module: torch.fx.GraphModule) -> list[str | None]:
    values = output_node(module.graph).args[0]
    return [None if v is None else str(v) for v in values]  # type: ignore[union-attr]


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.cos(), w).exp().sum()


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(product, weight(8, 8), weight(8, 8))


def test_everything_kept(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 1)
    assert returned(plan.forward) == ["sum_1", "primals_1", "primals_2", "cos", "exp"]
    assert placeholders(plan.backward) == ["primals_1", "primals_2", "cos", "exp", "tangents_1"]
    assert calls(plan.forward) == ["cos", "mm", "exp", "sum_1"]
    assert plan.recomputed == (), "the exponential takes no more bytes than the product"
    assert plan.saved_bytes == plan.full_bytes == 2 * 256


def test_the_cut_by_rules_is_a_solver(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 1, "cut")
    assert returned(plan.forward) == ["sum_1", "primals_1", "primals_2", "cos", "mm"]
    assert plan.recomputed == ("exp",), "an exponential is cheap to recompute"
    assert plan.saved_bytes == plan.full_bytes == 2 * 256
    assert plan.solver == "cut"
    assert remat.plan(joint, 0, "cut").saved_bytes == 0, "below it, the first cut that fits"


def test_tensors_that_autograd_does_not_check_come_behind_the_others() -> None:
    joint = joint_of(product, weight(8, 8), weight(8, 8))
    node(joint, "cos").meta["saved_tensor_with_no_vc_check"] = True
    plan = remat.plan(joint, 1)
    handed = ["primals_1", "primals_2", "exp", "cos"]
    assert returned(plan.forward) == ["sum_1", *handed]
    assert placeholders(plan.backward) == [*handed, "tangents_1"]


def test_what_runs_in_backward_is_marked_as_backward(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0)
    runs = [n for n in plan.backward.graph.nodes if n.op == "call_function"]
    assert all(n.meta["autograd_backward"] for n in runs)
    assert not any(n.meta.get("autograd_backward") for n in plan.forward.graph.nodes)


def test_only_sizes_are_saved_where_only_sizes_are_read() -> None:
    joint = joint_of(lambda x, w: (x @ w).sum(), torch.randn(6, 8), weight(8, 8), dynamic=True)
    result = Partition().run(State(joint=joint.copy()))
    assert result.forward is not None
    outputs = list(output_node(result.forward.graph).args[0])  # type: ignore[union-attr]
    kinds = [type(v.meta["val"]).__name__ for v in outputs]
    assert "mm" not in map(str, outputs[1:]), "backward of a sum reads sizes only"
    assert kinds == sorted(kinds, key=lambda k: k == "SymInt"), "sizes come last"
    assert result.backward is not None
    first = placeholders(result.backward)
    assert isinstance(node_value(result.backward, first[0]), torch.SymInt), "and first in backward"


def node_value(module: torch.fx.GraphModule, name: str) -> object:
    return next(n for n in module.graph.nodes if n.name == name).meta["val"]


def test_a_decision_for_another_graph_is_refused(joint: remat.JointGraph) -> None:
    state = State(joint=joint.copy(), decision=Decision(saved=("nobody",)))
    with pytest.raises(PlanError, match="saves 'nobody', but the joint graph has no such node"):
        Partition().run(state)


def test_halves_keep_what_aliases_what() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (h[:4].exp() * h[4:].exp()).sum()

    plan = remat.plan(joint_of(f, weight(8, 8), weight(8, 8)), 1)
    for module in (plan.forward, plan.backward):
        for n in module.graph.nodes:
            if n.op == "call_function" and "slice" in n.name and "backward" not in n.name:
                mine = n.meta["val"].untyped_storage()._cdata
                base = n.args[0].meta["val"].untyped_storage()._cdata
                assert mine == base, n.name


# Views --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_read_itself", "handed"), [(False, "permute"), (True, "mul")])
def test_a_view_is_handed_over_if_backward_reads_nothing_else(
    is_read_itself: bool, handed: str
) -> None:
    """Inductor lays a handed value out by its shape, and a convolution wants the layout of the permuted one."""

    def f(x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x * scale
        y = F.conv2d(h.permute(0, 3, 1, 2), w).sum()
        return y + h.sin().sum() if is_read_itself else y

    joint = remat.capture(f, (torch.randn(2, 6, 6, 3), weight(3), weight(4, 3, 1, 1)))
    plan = remat.plan(joint, 1)
    assert "mul" in plan.saved
    assert plan.saved_bytes == 2 * 6 * 6 * 3 * 4
    tensors = {handed, "primals_1", "primals_3"}
    assert {*returned(plan.forward)} & {"mul", "permute", "primals_1", "primals_3"} == tensors
    assert ("permute" in calls(plan.backward)) == is_read_itself


def test_a_view_that_fuses_with_its_readers_is_taken_again() -> None:
    """The product is in memory; Inductor could copy it for the shape of the view."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).view(2, 2, 2, 8).sin().sum()

    plan = remat.plan(remat.capture(f, (weight(8, 8), weight(8, 8))), 1, "cut")
    assert "mm" in returned(plan.forward)
    assert "view" in calls(plan.backward)


# Random numbers -----------------------------------------------------------------------------------


def drops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ w, 0.5, training=True).sin().sum()


@pytest.fixture(scope="module")
def dropped() -> remat.JointGraph:
    return joint_of(drops, weight(64, 64), weight(64, 64))


def test_a_replayed_draw_hands_the_state_of_its_generator_over(dropped: remat.JointGraph) -> None:
    plan = remat.plan(dropped, 0)
    assert "native_dropout" in plan.recomputed
    assert plan.saved_bytes == 5056 == torch.get_rng_state().nbytes


def test_a_small_draw_is_saved_rather_than_replayed() -> None:
    """64 numbers and their mask weigh less than the generator's state."""
    plan = remat.plan(joint_of(drops, weight(8, 8), weight(8, 8)), 0)
    assert "native_dropout" not in plan.recomputed
    assert plan.saved_bytes == 64 * 4 + 64


def test_at_full_budget_nothing_is_replayed(dropped: remat.JointGraph) -> None:
    plan = remat.plan(dropped, 1)
    targets = {n.target for m in (plan.forward, plan.backward) for n in m.graph.nodes}
    assert torch.ops.higher_order.run_and_save_rng_state not in targets
    assert torch.ops.aten.native_dropout.default in targets


def test_states_come_before_sizes() -> None:
    joint = joint_of(drops, torch.randn(96, 64), weight(64, 64), dynamic=True)
    plan = remat.plan(joint, 0)
    kinds = [
        "size" if isinstance(v.meta["val"], torch.SymInt) else "tensor"
        for v in output_node(plan.forward.graph).args[0]  # type: ignore[union-attr]
    ]
    assert kinds == sorted(kinds, reverse=True)
    names = placeholders(plan.backward)
    assert names.index("native_dropout_state") < names.index("tangents_1")
    sizes = [n for n in names if isinstance(node_value(plan.backward, n), torch.SymInt)]
    assert names[: len(sizes)] == sizes


# Order of backward --------------------------------------------------------------------------------


def test_reordering_keeps_the_meaning_and_is_stable(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0)
    graph = plan.backward.graph
    order = calls(graph)
    assert reorder(graph) == 0
    assert calls(graph) == order
    graph.lint()


def test_writes_stay_behind_reads(joint: remat.JointGraph) -> None:
    graph = remat.plan(joint, 1).backward.graph
    nodes = {n.name: n for n in graph.nodes}
    cos, reader = nodes["cos"], next(iter(nodes["cos"].users))
    with graph.inserting_before(output_node(graph)):
        written = graph.call_function(torch.ops.aten.copy_.default, (cos, nodes["exp"]))
        written.meta["val"] = cos.meta["val"]
    reorder(graph)
    order = calls(graph)
    assert order.index(reader.name) < order.index(written.name)

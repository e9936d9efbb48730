"""What is written is read back: the same graph, the same text, the same plans, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import remat
from remat.errors import ProblemError
from remat.graph.joint import Role, output_node
from remat.graph.text import parse_joint, print_joint
from tests.graph.text.checks import (
    assert_read_back,
    assert_same_plans,
    read_back,
    without_sources,
)
from tests.graph.text.steps import STEPS, captured
from tests.graphs import joint_of, node, traced
from tests.models import build
from tests.passes.programs import values_like

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_every_step_is_read_back(name: str) -> None:
    assert_read_back(captured(name), 0)


@pytest.mark.slow
def test_a_model_is_read_back() -> None:
    torch._dynamo.reset()
    step = build("gpt2")
    assert_read_back(remat.capture(step.model, step.args, step.kwargs), 0.3)


@pytest.mark.parametrize("name", ["mlp", "views", "several", "constants"])
def test_a_graph_that_was_read_computes_what_it_says(name: str) -> None:
    joint = captured(name)
    parsed = parse_joint(print_joint(joint))
    inputs = [*values_like(joint, Role.PRIMAL, 1), *values_like(joint, Role.TANGENT, 2)]
    expected = fx.Interpreter(joint.graph_module).run(*inputs, enable_io_processing=False)
    found = parsed.graph_module(*inputs)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_nothing_is_allocated_however_large_the_graph() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w).sin().sum()

    size = 2**20
    x = torch.empty(size, size, device="meta")
    joint = joint_of(f, x, torch.empty(size, size, device="meta", requires_grad=True))
    parsed = read_back(joint)
    assert remat.plan(parsed, 1, cost="roofline:h100").saved_bytes == 4 * size**2


@pytest.mark.parametrize("name", ["constants", "symbols"])
def test_a_graph_is_written_and_read_while_another_is_traced(name: str) -> None:
    joint = captured(name)
    text = print_joint(joint)
    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        assert print_joint(joint) == text
        parsed = parse_joint(text)
        assert print_joint(parsed) == text
    assert_same_plans(parsed, joint, 0.5)


def test_nodes_that_nothing_is_known_about_stay_so() -> None:
    joint = captured("mlp")
    del node(joint, "add").meta["val"]
    node(joint, "mm").meta.pop("partitioner_tag")
    parsed = read_back(joint)
    assert "val" not in node(parsed, "add").meta
    assert "partitioner_tag" not in node(parsed, "mm").meta


def test_metadata_that_steer_passes() -> None:
    joint = captured("mlp")
    node(joint, "mm").meta.update(has_backward_hook=True, saved_tensor_with_no_vc_check=True)
    node(joint, "relu").meta["custom"] = {"_region_activation_memory_budget": 0.25, "mine": [1]}
    node(joint, "mm").meta["custom"] = {"_region_activation_memory_budget": -0.5}  # none
    parsed = read_back(joint)
    text = without_sources(print_joint(joint))
    assert "aten.mm.default(primals_1, primals_2), backward_hook, unchecked\n" in text
    assert "aten.relu.default(mm), memory_budget(0.25)\n" in text
    assert node(parsed, "relu").meta["custom"] == {"_region_activation_memory_budget": 0.25}


@pytest.mark.parametrize("more", [-1, 1])
def test_each_output_has_one_descriptor(more: int) -> None:
    joint = captured("mlp")
    out = output_node(joint.graph)
    descs = pytree.arg_tree_leaves(out.meta["desc"])
    out.meta["desc"] = [*descs, descs[0]][: len(descs) + more]
    with pytest.raises(
        ProblemError, match=r"\d outputs have \d descriptors; expected one for each"
    ):
        print_joint(joint)


def test_a_graph_without_backward() -> None:
    joint = traced(lambda x: (x.sin(), [x.cos(), 3]), torch.ones(2))
    parsed = read_back(joint)
    assert [n.op for n in parsed.graph.nodes][-1] == "output"


def test_what_earlier_graphs_hand_over() -> None:
    joint = captured("mlp")
    object.__setattr__(joint, "received", ((0, 1, 2), (1, 0, 0)))
    object.__setattr__(joint, "shared", ((2, 0, 1),))
    object.__setattr__(joint, "returned", (0,))
    object.__setattr__(joint, "runs", 3)
    object.__setattr__(joint, "static_inputs", tuple(range(100)))
    object.__setattr__(joint, "name", "a \"name\" in 'quotes'\n")
    read_back(joint)


def test_symbols_keep_hints_and_ranges() -> None:
    parsed = read_back(captured("symbols"))
    size = node(parsed, "primals_1").meta["val"]
    assert size.node.hint == 8
    known = size.node.shape_env.var_to_range[size.node.expr]
    assert (known.lower, str(known.upper)) == (2, "int_oo")
    # A guard about it can be made, as on a graph that was captured.
    assert bool(size > 5)

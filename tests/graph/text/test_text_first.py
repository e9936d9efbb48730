"""Texts that a person wrote: what the form can say beyond what captured steps need."""

from __future__ import annotations

import functools
import math
import textwrap
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental._backward_state import BackwardState
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import ProblemError
from remat.graph import text as form
from remat.graph.capture.source import source_line
from remat.graph.memory.storages import storage_key
from remat.graph.text import parse_graph, parse_joint, print_graph, print_joint
from tests.graphs import node

EVERYTHING = """\
joint(
    "everything",
    version=1,
    device="cuda:0",
    lower="inductor",
    num_fwd_outputs=2,
    static_inputs=[0],
    received=[(1, 0, 2)],
)
symbols(
    s0=symbol(8, min=2, max=64, positive=False),
    u0=symbol(min=0, size_like=True),
    zf0=symbol(0.5),
    zuf0=symbol(max=1.5),
)

part("is_forward")
primals_1: f32[4, 4] = primal(ParamAOTInput("layer.weight"))
primals_2: SymInt[s0] = primal(SubclassSizeAOTInput(PlainAOTInput(3), 0))
primals_3: f32[2, 3](1, 2, offset=5, storage=64, device="cpu") = primal(PlainAOTInput(-1))
fwd_seed_1: i64 = forward_seed(PhiloxForwardSeedAOTInput())
part("is_backward")
tangents_1: bf16[(s0//2) + 1, 3](3*s0, 1, offset=s0, storage=100*s0**2) = tangent()
bwd_seed_1: i64 = backward_seed(target="bwd_seed_0")
state: backward_state = backward_state()
part(None)
doubled: f32[4, 4] = aten.add.Tensor(primals_1, primals_1), must_save, region(0)
own: f32[4, 4] @ None = aten.t.default(primals_1), prefer_recompute, backward_hook, unchecked
late: i32[8] @ primals_1 = aten.sin.default(own), must_cpu_offload, memory_budget(0.25)
pair: (f32[2] @ primals_1, [f32[4], i64[2] @ pair[1][0], ()]) = aten.var_mean.default(own)
inner: [f32[4], i64[2], ()] = pair[1]
last: () = pair[-1]
sizes: (SymInt[s0*u0], SymFloat[2.5*zf0 + zuf0], SymBool[u0 >= 2]) = operator.add(primals_2, 1)
plain: (-3, True, -inf, "a", None) = math.floor(-0.0)
other: opaque("torch._C.Generator") = torch.sym_max(1, 2)
unknown = builtins.round(complex(nan, -0.0))
constant("numbers.small", b8[2], [True, False])
small: b8[2] = get_attr("numbers.small")
constant("numbers.large", f32[1000](device="cpu"))
large: f32[1000](device="cpu") = get_attr("numbers.large")
attribute("script", opaque("__torch__.Queue", "<queue>"))
script: opaque("__torch__.Queue", "<queue>") = get_attr("script")

with subgraph("body"):
    x: f32[4, 4] @ joint.primals_1 = placeholder()

    with subgraph("deeper"):
        y: f32[4, 4] @ joint.primals_1 = placeholder()
        return {"y": y, 3: (y, [])}

    deeper = get_attr("deeper")
    z: f32[4, 4] = higher_order.invoke_subgraph(deeper, "d", x)
    return (
        output(z, SavedForBackwardsAOTOutput(0)),
        output(None),
    )

body = get_attr("body")
call: (f32[4, 4] @ joint.body.z,) = higher_order.cond(body, body, body, (primals_1, SymInt[s0 + 1]))
args: f32[2] = aten.index.Tensor(own, [None, small, ...], **{"from": 1})
draw: f32[2] = op("aten.random.from")(own, 1, None, generator=opaque("a.Generator", "it"))
torches: f32 = aten.full.default((2, 3), 1e-05, dtype=torch.float8_e4m3fn, layout=torch.strided, device=torch.device("cuda:1"), memory_format=torch.channels_last)
more: f32 = aten.mm.default(aten.mm.default, higher_order.cond, op("aten.random.from"), {"a": [(), (1,)]}, 'it\\'s "so"\\n')
noted: f32 = aten.mm.default()  # model.py:12 y = x  # twice
within: f32 = aten.mm.default()  # Sequential / Linear
return (
    forward(late, PlainAOTOutput(0)),
    forward(3, InputMutationAOTOutput(ViewBaseAOTInput(PlainAOTInput(0)))),
    backward(None),
    backward(own, GradAOTOutput(ParamAOTInput("layer.weight"))),
    backward(primals_2, opaque("mine.Output", "mine")),
)
"""


@functools.cache
def everything() -> remat.JointGraph:
    return parse_joint(EVERYTHING)


def value(name: str) -> Any:
    return node(everything(), name).meta["val"]


def test_everything_is_read_and_written_as_it_was() -> None:
    assert print_joint(everything()) == EVERYTHING
    assert everything().fingerprint == parse_joint(EVERYTHING).fingerprint


def test_tensors_are_what_their_types_say() -> None:
    weight, strided, symbolic = value("primals_1"), value("primals_3"), value("tangents_1")
    assert weight.device == torch.device("cuda:0")
    assert (strided.device.type, strided.untyped_storage().nbytes()) == ("cpu", 64)
    assert (str(symbolic.shape[0]), str(symbolic.stride(0))) == ("((s0//2)) + 1", "3*s0")
    assert symbolic.shape[0].node.hint == 5


def test_tensors_lie_where_they_are_said_to() -> None:
    joint = everything()

    def key(name: str, *path: int) -> int | None:
        found = node(joint, name).meta["val"]
        for k in path:
            found = found[k]
        return storage_key(found)

    assert key("own") != key("primals_1")
    assert key("late") == key("primals_1") == key("pair", 0)
    assert key("pair", 1, 0) == key("pair", 1, 1) == key("inner", 0)
    assert key("pair", 1, 0) != key("pair", 0)
    body: Any = joint.graph_module.body
    x, z = (n for n in body.graph.nodes if n.name in "xz")
    (y,) = (n for n in body.deeper.graph.nodes if n.name == "y")
    assert storage_key(x.meta["val"]) == storage_key(y.meta["val"]) == key("primals_1")
    assert storage_key(z.meta["val"]) == key("call", 0)


def test_numbers_and_objects() -> None:
    product, mixed, comparison = value("sizes")
    assert isinstance(product, torch.SymInt)
    assert (str(product), product.node.hint) == ("s0*u0", None)
    assert isinstance(mixed, torch.SymFloat)
    assert isinstance(comparison, torch.SymBool)
    assert value("plain") == (-3, True, -math.inf, "a", None)
    assert isinstance(value("state"), BackwardState)
    assert type(value("other")).__name__ == "Generator"
    assert repr(value("script")) == "<queue>"
    assert "val" not in node(everything(), "unknown").meta


def test_arguments() -> None:
    joint = everything()
    args = node(joint, "args")
    assert args.args[1] == [
        None,
        node(joint, "small"),
        ...,
    ]
    assert args.kwargs == {"from": 1}
    (number,) = node(joint, "unknown").args
    assert isinstance(number, complex)
    assert math.isnan(number.real)
    assert math.copysign(1, number.imag) == -1
    assert node(joint, "torches").args == ((2, 3), 1e-05)
    assert dict(node(joint, "torches").kwargs) == {
        "dtype": torch.float8_e4m3fn,
        "layout": torch.strided,
        "device": torch.device("cuda", 1),
        "memory_format": torch.channels_last,
    }
    mm, cond = torch.ops.aten.mm.default, torch.ops.higher_order.cond
    draw = getattr(torch.ops.aten.random, "from")
    text = 'it\'s "so"\n'
    assert node(joint, "more").args == (mm, cond, draw, {"a": [(), (1,)]}, text)


def test_constants_are_real_where_their_numbers_are_written() -> None:
    parts: Any = everything().graph_module.numbers
    assert hasattr(parts.small, "fake_mode")  # its device is not this machine's to fill
    assert hasattr(parts.large, "fake_mode")
    on_the_cpu = parse_joint(EVERYTHING.replace("cuda:0", "cpu"))
    small: Any = on_the_cpu.graph_module.numbers
    assert torch.equal(small.small, torch.tensor([True, False]))


def test_marks_and_sources() -> None:
    joint = everything()
    assert node(joint, "late").meta["recompute"] is CheckpointPolicy.MUST_CPU_OFFLOAD
    assert source_line(node(joint, "noted")) == "model.py:12 y = x  # twice"
    assert source_line(node(joint, "within")) == "Sequential / Linear"


def test_a_graph_by_itself() -> None:
    text = 'graph("half", version=1, device="cpu")\n\nx = placeholder()\nreturn [x, (), {}]\n'
    module = parse_graph(text)
    assert print_graph(module, "half") == text
    assert module(3) == [3, (), {}]


def test_the_example_of_the_form_is_one() -> None:
    example = (form.__doc__ or "").partition("::\n\n")[2].partition("\n\nA type")[0]
    text = textwrap.dedent(example) + "\n"
    assert text.startswith("joint(")
    assert print_joint(parse_joint(text)) == text


def test_people_may_write_as_they_like() -> None:
    """Line ends, blank lines, comments by themselves, and blanks do not matter."""
    text = 'graph ( "g",version=1,\r\n device="cpu" )\r\n# a note\r\nx :f32[ 2,3 ]=placeholder( )#  here\r\n\r\nreturn(x)'
    module = parse_graph(text)
    assert print_graph(module, "g") == (
        'graph("g", version=1, device="cpu")\n\nx: f32[2, 3] = placeholder()  # here\nreturn x\n'
    )


def unwritable() -> dict[str, tuple[Any, str]]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    wrapped = TwoTensor(torch.ones(2), torch.ones(2))
    return {
        "method": (graph.call_method("sin", (x,)), "it is a call_method of 'sin'"),
        "function": (
            graph.call_function(torch.sin, (x,)),
            "has no text form: expected an operator",
        ),
        "default": (graph.placeholder("y", default_value=1), "it has a default value"),
        "tag": (_with(graph, recompute=3), "recompute tag 3; expected a CheckpointPolicy"),
        "part": (_with(graph, partitioner_tag="mine"), "partitioner tag 'mine'; expected one of"),
        "ragged": (_with(graph, val=torch._C._get_nested_int(1, 1)), "no expression of symbols"),
        "subclass": (_with(graph, val=wrapped), "a TwoTensor of torch.float32 has no text form"),
    }


def _with(graph: fx.Graph, **meta: Any) -> fx.Node:
    made = graph.call_function(torch.ops.aten.sin.default, ())
    made.meta.update(meta)
    return made


@pytest.mark.parametrize("name", unwritable())
def test_what_has_no_text_is_refused_with_its_node(name: str) -> None:
    odd, says = unwritable()[name]
    graph = odd.graph
    for other in reversed(graph.nodes):
        if other is not odd and not other.users:
            graph.erase_node(other)
    graph.output(())
    with pytest.raises(ProblemError) as caught:
        print_graph(fx.GraphModule(torch.nn.Module(), graph))
    assert says in str(caught.value)
    assert f"'{odd.name}'" in str(caught.value)

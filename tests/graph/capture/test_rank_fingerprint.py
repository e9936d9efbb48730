"""What two ranks must share to share a decision, and what they are told where they do not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.graph.capture.rank_fingerprint import Outline, first_difference, outline
from tests.graphs import node, traced

WHO = ("rank 1", "rank 0")
X = torch.ones(4, 3)


def outlined(f: Callable[..., object], *args: torch.Tensor) -> Outline:
    return outline(traced(f, *(args or (X,))))


def test_constants_and_names_do_not_count() -> None:
    one, other = traced(lambda x: (x + 1).sin(), X), traced(lambda x: (x + 2).sin(), X)
    node(other, "sin").name = "sine"
    assert one.fingerprint != other.fingerprint
    assert outline(one).digest == outline(other).digest
    assert outline(one).names != outline(other).names
    assert first_difference(outline(one), outline(other), WHO) is None


def test_the_number_of_a_device_does_not_count_but_its_kind_does() -> None:
    def on(*devices: str) -> Outline:
        graph = fx.Graph()
        for i, device in enumerate(devices):
            with FakeTensorMode():
                value = torch.empty(2, device=device)
            graph.placeholder(f"primals_{i}").meta["val"] = value
        graph.output(())
        joint = SimpleNamespace(graph=graph, num_fwd_outputs=0)
        return outline(joint)  # type: ignore[arg-type]

    assert on("cuda:0", "cuda:0").digest == on("cuda:1", "cuda:1").digest
    assert on("cuda:0", "cuda:1").digest == on("cuda:1", "cuda:0").digest
    assert on("cuda:0", "cuda:1").digest != on("cuda:0", "cuda:0").digest
    assert on("cuda:0").digest != on("cpu").digest


def test_shapes_strides_dtypes_and_tags_count() -> None:
    digests = {
        outlined(torch.sin, x).digest for x in (X, torch.ones(3, 4), torch.ones(3, 4).T, X.double())
    }
    tagged = traced(torch.sin, X)
    node(tagged, "sin").meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert len(digests | {outline(tagged).digest}) == 5


def test_functions_are_named_without_their_address() -> None:
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    graph.output(graph.call_function(torch.sym_max, (x, x)))
    assert "0x" in str(torch.sym_max)
    joint = remat.JointGraph(graph_module=fx.GraphModule({}, graph), num_fwd_outputs=1)
    assert "torch.sym_max -> NoneType" in outline(joint).calls


def reads_the_sine(x: torch.Tensor) -> torch.Tensor:
    a = x.sin()
    return a * a.cos()


@pytest.mark.parametrize(
    ("one", "other", "start", "end"),
    [
        (
            lambda x: x.sin().cos(),
            lambda x: x.cos().sin(),
            "node 1 is 'sin' (aten.sin.default -> float32[4, 3] by [3, 1] on cpu), which reads x_1, on rank 1",
            "'cos' (aten.cos.default -> float32[4, 3] by [3, 1] on cpu), which reads x_1, on rank 0",
        ),
        (
            lambda x: x.sin() * x.cos(),
            reads_the_sine,
            "node 2 is 'cos' (aten.cos.default -> float32[4, 3] by [3, 1] on cpu), which reads x_1, on rank 1",
            "which reads sin, on rank 0",
        ),
        (
            lambda x: x + x.sin(),
            lambda x: x.sin() + x,
            "node 2 is 'add' (aten.add.Tensor -> float32[4, 3] by [3, 1] on cpu), which reads x_1, sin, on rank 1",
            "which reads sin, x_1, on rank 0",
        ),
        (
            lambda x: (x.sin(), x),
            lambda x: (x, x.sin()),
            "node 2 is 'output' (output of 2 + xx), which reads sin, x_1, on rank 1",
            "which reads x_1, sin, on rank 0",
        ),
    ],
)
def test_another_order_and_other_edges_are_said(
    one: Callable[..., object], other: Callable[..., object], start: str, end: str
) -> None:
    mine, theirs = outlined(one), outlined(other)
    assert mine.digest != theirs.digest
    said = first_difference(mine, theirs, WHO)
    assert said is not None
    assert said.startswith(start)
    assert said.endswith(end)


def test_what_one_side_alone_has_is_said() -> None:
    said = first_difference(
        outlined(lambda x: (x.sin().exp().exp().exp().exp() + 1).tanh()),
        outlined(lambda x: (x.cos() + 1).tanh()),
        WHO,
    )
    assert said == (
        "rank 1 alone has 'sin' (aten.sin.default -> float32[4, 3] by [3, 1] on cpu); 'exp' "
        "(aten.exp.default -> float32[4, 3] by [3, 1] on cpu); 'exp_1' (aten.exp.default -> "
        "float32[4, 3] by [3, 1] on cpu) and 2 more; rank 0 alone has 'cos' (aten.cos.default -> "
        "float32[4, 3] by [3, 1] on cpu) (of 9 nodes on rank 1, 5 on rank 0)"
    )

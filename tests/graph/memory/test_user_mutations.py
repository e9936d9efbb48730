"""Which inputs eager autograd leaves to the user between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.descriptors import ParamAOTInput
from torch.nn import functional as F

import remat
from remat.graph.memory.user_mutations import user_mutable_inputs
from tests.graphs import node

T = torch.Tensor

W = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
B = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(2)))


class KeepsItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> T:
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (x,) = ctx.saved_tensors
        return None, gradients[0] * x


def floats(*shape: int) -> T:
    return torch.rand(*(shape or (8, 8)))


def ids() -> T:
    return torch.arange(8)


#: Programs over what they are given; eager PyTorch says which inputs it saves.
PROGRAMS: dict[str, tuple[Callable[..., T], tuple[T, ...]]] = {
    "multiplied": (lambda x: x @ W, (floats(),)),
    "multiplied after a function": (lambda x: x.sin() @ W, (floats(),)),
    "a view multiplied": (lambda x: x.view(4, 16).view(8, 8).t()[2:] @ W, (floats(),)),
    "elements of a list of views": (lambda x: x.chunk(2)[0] * W[:4] + x[4:].exp(), (floats(),)),
    "views of what is computed": (lambda x: (x.cos().t()[2:]) @ W, (floats(),)),
    "a copy": (lambda x: x.clone() * W, (floats(),)),
    "one of two": (lambda x, y: (x.sin() @ W) * y, (floats(), floats())),
    "indices": (lambda i: F.embedding(i, W).sin(), (ids(),)),
    "indices computed": (lambda i: F.embedding(i.clamp(0, 5), W).sin(), (ids(),)),
    "indices as they are": (lambda i: W[i].sin(), (ids(),)),
    "a mask": (lambda m: W.sin().masked_fill(m[None], 0), (floats(8) > 0.5,)),
    "a mask computed": (lambda x: W.sin().masked_fill(x > 0.5, 0), (floats(),)),
    "targets": (lambda x, t: F.cross_entropy(x.cos() @ W, t), (floats(), ids())),
    "targets that are regressed": (lambda x, t: F.mse_loss(x.cos() @ W, t), (floats(), floats())),
    "soft targets": (lambda t: F.cross_entropy(W.sin(), t.softmax(-1)), (floats(),)),
    "a cast": (lambda x: (x.bfloat16() @ W.bfloat16()).float(), (floats(),)),
    "a cast that does nothing": (lambda x: x.float() @ W, (floats(),)),
    "a sign": (lambda x: (x + W).abs() * x.abs(), (floats(),)),
    "the shape alone": (lambda x: W.sin().view(x.shape) + torch.zeros_like(x), (floats(),)),
    "saved by a function of the user's": (lambda x: KeepsItsInput.apply(x, W), (floats(),)),  # type: ignore[no-untyped-call]
    "dropped": (lambda x: F.dropout(x) @ W, (floats(),)),
    "differentiated": (lambda x: x.sin() @ W, (floats().requires_grad_(),)),
    "differentiated by its result": (lambda x: x.exp() @ W, (floats().requires_grad_(),)),
    "an argument of a norm": (lambda x: F.layer_norm(x, (8,), B), (floats(),)),
    # Merging equal nodes would hide that backward itself reads the input.
    "a sign that is computed": (lambda x: (x.sgn() * W).sum() + (x * W.abs()).sum(), (floats(),)),
}


def saved_by_eager(f: Callable[..., T], args: tuple[T, ...]) -> list[bool]:
    """For each argument, whether autograd minds that it is overwritten before backward."""
    minded = []
    for k in range(len(args)):
        given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        loss = f(*given).sum()
        with torch.no_grad():
            given[k].zero_()
        try:
            loss.backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            minded.append(True)
        else:
            minded.append(False)
    return minded


def run_all(given: dict[str, tuple[T, ...]]) -> list[T]:
    """All programs as one step, so that one capture serves every input."""
    return [f(*given[name]) for name, (f, _) in PROGRAMS.items()]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.slow
def test_it_is_what_eager_autograd_does_not_save(lower: str) -> None:
    torch._dynamo.reset()
    joint = remat.capture(
        run_all, ({name: args for name, (_, args) in PROGRAMS.items()},), lower=lower
    )
    # Inputs stand in the order in which they are read, parameters between them.
    inputs = [
        n.name
        for k, n in enumerate(joint.graph.find_nodes(op="placeholder"))
        if k not in joint.static_inputs and "tangents" not in n.name
    ]
    minded = [(name, m) for name, case in PROGRAMS.items() for m in saved_by_eager(*case)]
    if lower == "inductor":  # which drops the copy, so that autograd saves the input itself
        minded[minded.index(("a copy", False))] = ("a copy", True)
    mutable = user_mutable_inputs(joint)
    found = [(name, n not in mutable) for (name, _), n in zip(minded, inputs, strict=True)]
    assert found == minded


def test_parameters_and_buffers_are_none() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 8))
            self.bias = torch.nn.Parameter(torch.ones(8))
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: T) -> T:
            return (x.sin() @ self.weight.cos()) * self.scale.exp() + self.bias.exp()

    torch._dynamo.reset()
    joint = remat.capture(Model(), (floats(),), lower="eager")
    assert user_mutable_inputs(joint) == {"primals_1"}
    # Where a trace does not list them as static, it may say so of each.
    unlisted = replace(joint, static_inputs=())
    (bias,) = user_mutable_inputs(unlisted) - {"primals_1", "primals_3"}
    node(joint, bias).meta["desc"] = ParamAOTInput(target="bias")
    assert user_mutable_inputs(unlisted) == {"primals_1", "primals_3"}

"""Training steps of a real model's size for the search to make small."""

from __future__ import annotations

import functools
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch.nn import functional as F

import remat
from remat.graph.joint import JointGraph, copy_module
from remat.graph.text import parse_joint, print_joint

T = torch.Tensor


@torch.library.custom_op("remat_tests_reduction::noisy", mutates_args=())
def noisy(x: T) -> T:
    """Draws a number in a way that nobody can see."""
    return x * torch.rand(())


@noisy.register_fake
def _(x: T) -> T:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, g: g * 1.0)


class Block(nn.Module):
    def __init__(self, width: int, *, custom: bool) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.custom = custom

    def forward(self, x: T) -> T:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        h = F.gelu(self.up(self.norm_2(x)))
        return x + self.down(noisy(h).sin() if self.custom else h)


class Gpt(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, *, custom: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        blocks = (Block(width, custom=custom and k == 1) for k in range(layers))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, tokens: T) -> T:
        return self.head(self.blocks(self.embed(tokens)))


@functools.cache
def gpt(*, custom: bool = False) -> JointGraph:
    """The joint graph of a transformer of two layers, near 300 nodes."""
    torch._dynamo.reset()
    tokens = torch.zeros(2, 8, dtype=torch.long)
    # As text, nothing of the capture lives on.
    return parse_joint(print_joint(remat.capture(Gpt(custom=custom), (tokens,), lower="eager")))


@functools.cache
def gpt_with_writes() -> JointGraph:
    """The same behind a list that is doubled in place, in a graph without functions made of writes."""
    taken: list[JointGraph] = []
    block = Block(16, custom=False)
    names = [name for name, _ in block.named_parameters()]

    def program(x: T, w: T, *weights: T) -> T:
        for _ in range(2):
            named = dict(zip(names, weights, strict=True))
            x = torch.func.functional_call(block, named, (x @ w,))
        made = [torch.sin(x), torch.cos(x)]
        torch._foreach_mul_(made, 2.0)
        return torch.sin(made[0] @ w) + torch.exp(made[1])

    def take(module: torch.fx.GraphModule, inputs: Any, **how: Any) -> Any:
        n = how["num_fwd_outputs"]
        taken.append(JointGraph(graph_module=copy_module(module), num_fwd_outputs=n))
        return default_partition(module, inputs, **how)

    def as_it_is(module: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    compiled = aot_function(program, as_it_is, as_it_is, take, disable_functionalization=True)
    weights = (p.detach().requires_grad_() for p in block.parameters())
    compiled(torch.randn(2, 8, 16), torch.randn(16, 16, requires_grad=True), *weights)
    return taken[0]

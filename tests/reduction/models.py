"""Training steps of a real model's size, for the search to reduce."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.graph.joint import JointGraph
from remat.graph.text import parse_joint, print_joint

T = torch.Tensor


@torch.library.custom_op("remat_tests_reduction::noisy", mutates_args=())
def noisy(x: T) -> T:
    """Draw a random number without declaring the effect."""
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
    def __init__(self, width: int = 16, *, custom: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.block = Block(width, custom=custom)

    def forward(self, tokens: T) -> T:
        return self.head(self.block(self.embed(tokens)))


@functools.cache
def gpt(*, custom: bool = False) -> JointGraph:
    """Return the joint graph of a transformer of one layer, with about 150 nodes."""
    torch._dynamo.reset()
    tokens = torch.zeros(2, 8, dtype=torch.long)
    # Text keeps no objects of the capture alive.
    return parse_joint(print_joint(remat.capture(Gpt(custom=custom), (tokens,), lower="eager")))


#: A list that is overwritten in place, in a graph that is not functionalised.
WRITES = """joint("writes", version=1, device="cpu", lower="eager", num_fwd_outputs=1)

primals_1: f32[8, 8] = primal()
primals_2: f32[8, 8] = primal()
tangents_1: f32[8, 8] = tangent()
mm: f32[8, 8] = aten.mm.default(primals_1, primals_2)
sin: f32[8, 8] = aten.sin.default(mm)
cos: f32[8, 8] = aten.cos.default(primals_1)
_foreach_mul_ = aten._foreach_mul_.Scalar([sin, cos], 2.0)
mm_1: f32[8, 8] = aten.mm.default(sin, primals_2)
add: f32[8, 8] = aten.add.Tensor(mm_1, cos)
t: f32[8, 8](1, 8) = aten.t.default(sin)
mm_2: f32[8, 8] = aten.mm.default(t, tangents_1)
t_1: f32[8, 8](1, 8) = aten.t.default(primals_2)
mm_3: f32[8, 8] = aten.mm.default(tangents_1, t_1)
mul: f32[8, 8] = aten.mul.Scalar(mm_3, 2.0)
cos_1: f32[8, 8] = aten.cos.default(mm)
mul_1: f32[8, 8] = aten.mul.Tensor(mul, cos_1)
t_2: f32[8, 8](1, 8) = aten.t.default(primals_1)
mm_4: f32[8, 8] = aten.mm.default(t_2, mul_1)
add_1: f32[8, 8] = aten.add.Tensor(mm_2, mm_4)
return [
    forward(add),
    backward(None),
    backward(add_1),
]
"""

"""Random training steps: small programs in plain PyTorch, drawn by Hypothesis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import remat
from remat.graph.joint import Role, role_of

SIZE = 8

#: What a program is made of. Each takes and returns square matrices of `SIZE`; dropout and noise
#: draw from the default generator, so that a plan that draws anew is noticed.
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "exp-sum": lambda x: torch.exp(-x * x),
    "softmax": lambda x: torch.softmax(x, -1),
    "norm": lambda x: nn.functional.layer_norm(x, (SIZE,)),
    "transpose": lambda x: x.T,
    "view": lambda x: x.reshape(-1).view(SIZE, SIZE),
    "split": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "unbind": lambda x: torch.stack([r * (i + 1) for i, r in enumerate(x.unbind(0))]),
    "row-sum": lambda x: x.sum(0, keepdim=True).expand(SIZE, SIZE),
    "row-max": lambda x: x - x.max(dim=1, keepdim=True).values,
    "sort": lambda x: torch.sort(x, dim=1).values,
    "var-mean": lambda x: (lambda v, m: (x - m) * torch.rsqrt(v + 1))(
        *torch.var_mean(x, 1, keepdim=True)
    ),
    "dropout": lambda x: nn.functional.dropout(x, 0.4, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise-scale": lambda x: x * torch.rand(SIZE, 1),
    "in-place": lambda x: (x * 1.5).add_(1).mul_(x),
    "detach": lambda x: x + x.detach().cos(),
    "diagonal": lambda x: x + torch.diag_embed(x.diagonal()),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b: a @ b / SIZE,
    "add": torch.add,
    "mul": torch.mul,
    "where": lambda a, b: torch.where(a > b, a, 0.5 * b),
    "addmm": lambda a, b: torch.addmm(a, a, b) / SIZE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A straight-line program over a growing list of values.

    Attributes:
        lines: operator, then the values it reads. Values 0 to 3 are an input, two weights and what
            is computed from a buffer; ``mutate`` writes to the buffer and yields what is computed
            from it then. (The buffer itself is never differentiated through: autograd would refuse
            the mutation.)
        outputs: values that the step returns.
    """

    lines: tuple[tuple[str, int, int], ...]
    outputs: tuple[int, ...]

    def __call__(self, x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, buf: torch.Tensor) -> Any:
        values = [x, u, v, torch.sin(buf @ buf)]
        for name, a, b in self.lines:
            if name == "mutate":
                with torch.no_grad():
                    buf.mul_(0.5).add_(0.1)
                values.append(torch.cos(buf))
            elif name in UNARY:
                values.append(UNARY[name](values[a]))
            else:
                values.append(BINARY[name](values[a], values[b]))
        # The weights take part, so that there is always something to differentiate.
        tail = (values[-1] * torch.sin(u @ v)).sum()
        return tail, [values[k].clone() if k < 4 else values[k] for k in self.outputs]


class Model(nn.Module):
    """A program with weights and a buffer of its own."""

    buf: torch.Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.u = nn.Parameter(torch.randn(SIZE, SIZE))
        self.v = nn.Parameter(torch.randn(SIZE, SIZE))
        self.register_buffer("buf", torch.randn(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(x, self.u, self.v, self.buf)


@functools.cache
def captured(program: Program) -> remat.JointGraph:
    """The joint graph of a program in the eager lowering."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return remat.capture(Model(program), (torch.randn(SIZE, SIZE),), lower="eager")


@st.composite
def programs(draw: st.DrawFn, max_lines: int = 12) -> Program:
    """Straight-line programs."""
    lines: list[tuple[str, int, int]] = []
    names = [*UNARY, *BINARY, *["mm"] * 4, *["dropout", "noise", "mutate"] * 2]
    for count in range(4, 4 + draw(st.integers(2, max_lines))):
        name = draw(st.sampled_from(names))
        # Late values are read more often: programs grow long rather than wide.
        pick = st.one_of(st.integers(max(0, count - 3), count - 1), st.integers(0, count - 1))
        lines.append((name, draw(pick), draw(pick)))
    outputs = draw(st.lists(st.integers(0, 3 + len(lines)), max_size=2, unique=True))
    return Program(lines=tuple(lines), outputs=tuple(outputs))


def values_like(joint: remat.JointGraph, role: Role, seed: int) -> list[torch.Tensor]:
    """Real tensors in the shapes of a joint graph's placeholders."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for node in joint.graph.find_nodes(op="placeholder"):
        if role_of(node) is role:
            fake = node.meta["val"]
            real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            found.append(real.normal_(generator=generator))
    return found

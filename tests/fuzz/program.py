"""Random training steps as Python source, and the tensors that they are given."""

from __future__ import annotations

import enum
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.fuzz import functions


class Kind(enum.Enum):
    """What an input of a program is to autograd, and to other inputs."""

    WEIGHT = "weight"
    DATA = "data"
    COMPUTED = "computed from a weight"
    SAME = "another input once more"
    VIEW = "a view of another input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One argument of a program; ``of`` is the input that it is, or views."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: Kind = Kind.WEIGHT
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A straight-line program with a tuple of tensors for a result.

    Attributes:
        inputs: what it takes, called ``a0``, ``a1``, ….
        lines: its statements.
        outputs: names of the values that it returns.
    """

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def source(self) -> str:
        names = ", ".join(f"a{k}" for k in range(len(self.inputs)))
        body = "\n".join(self.lines).replace("\n", "\n    ")
        return f"def step({names}):\n    {body}\n    return {', '.join(self.outputs)},\n"

    def __repr__(self) -> str:
        shown = "\n".join(f"# a{k}: {i!r}" for k, i in enumerate(self.inputs))
        return f"\n{shown}\n{self.source}"

    def function(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The program as a function whose regions run by ``checkpoint``."""
        space = namespace(checkpoint)
        # Dynamo and stack traces look lines up by file name.
        name = f"<program {hash(self.source):x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        exec(compile(self.source, name, "exec"), space)
        step: Callable[..., Any] = space["step"]
        return step

    def tensors(self, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Weights, and the arguments of a run; the same ones for the same seed."""
        return make_inputs(self.inputs, seed)


def namespace(checkpoint: Callable[..., Any]) -> dict[str, Any]:
    """What the lines of a program may name."""
    space: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint}
    for name in (*functions.FUNCTIONS, *functions.OPERATORS):
        space[name] = getattr(functions, name)
    return space


def make_inputs(
    inputs: Sequence[Input], seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The leaves that are differentiated, and the arguments."""
    generator = torch.Generator().manual_seed(seed)
    weights: list[torch.Tensor] = []
    args: list[torch.Tensor] = []
    for i in inputs:
        if i.kind is Kind.SAME:
            args.append(args[i.of])
        elif i.kind is Kind.VIEW:
            args.append(args[i.of].detach().view(-1)[1:])
        else:
            value = torch.randn(i.shape, generator=generator).mul_(3 if i.dtype == "int64" else 1)
            value = value.abs() if i.dtype == "int64" else value
            value = value.to(getattr(torch, i.dtype))
            if i.kind in (Kind.WEIGHT, Kind.COMPUTED):
                weights.append(value.requires_grad_())
            args.append(value * 1.0 if i.kind is Kind.COMPUTED else value)
    return weights, args


def run_step(
    step: Callable[..., Any], weights: list[torch.Tensor], args: list[torch.Tensor], seed: int = 5
) -> dict[str, torch.Tensor]:
    """Runs forward and backward; returns outputs, gradients, inputs as left, and the generator."""
    functions.begin_run()
    torch.manual_seed(seed)
    outputs = step(*args)
    found = {f"output {k}": v.detach().clone() for k, v in enumerate(outputs)}
    wanted = [v for v in outputs if v.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    # Complex outputs have complex gradients.
    seeds = [torch.randn(v.shape, generator=generator).to(v.dtype) for v in wanted]
    grads = torch.autograd.grad(wanted, weights, seeds, allow_unused=True)
    for k, (w, g) in enumerate(zip(weights, grads, strict=True)):
        found[f"gradient {k}"] = torch.zeros_like(w) if g is None else g
    found |= {f"argument {k}": v.detach() for k, v in enumerate(args)}
    found["random state"] = torch.get_rng_state()
    found["calls"] = functions.calls()
    return found

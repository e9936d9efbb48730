"""What a graph fetches by name: constants, and which names it may have."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph.text.literals import ArgumentReader, ArgumentWriter
from remat.graph.text.syntax import IDENTIFIER, MAX_NAME, Source
from remat.graph.text.values import ValueReader

#: Constants of so many elements are written with their numbers; of others only the type is.
MAX_CONSTANT = 64


def write_numbers(tensor: torch.Tensor, literals: ArgumentWriter) -> str | None:
    """The numbers of a constant as nested lists; None where they are many, or not there."""
    real = getattr(tensor, "constant", None) if hasattr(tensor, "fake_mode") else tensor
    if not isinstance(real, torch.Tensor) or real.layout is not torch.strided:
        return None
    if real.device.type == "meta" or real.is_quantized or real.numel() > MAX_CONSTANT:
        return None
    # A graph may be printed while it is compiled, when every new tensor would be a fake one.
    with torch_compat.disable_current_modes():
        return literals.write(real.detach().tolist())


def read_constant(
    source: Source, values: ValueReader, literals: ArgumentReader, args: list[ast.expr]
) -> torch.Tensor:
    """A constant: real where its numbers are written and it is as plain as that; else fake."""
    fake = values.constant(args[1])
    if len(args) == 2:
        return fake
    numbers = literals.read(args[2])
    dense = fake.layout is torch.strided and all(type(s) is int for s in fake.shape)
    if not dense or fake.numel() > MAX_CONSTANT:
        expected = f"those of {MAX_CONSTANT} elements at most"
        raise source.error(args[2], expected, "the numbers of such a tensor")
    try:
        flat = torch.tensor(numbers, dtype=fake.dtype, device="cpu")
    except (OverflowError, RuntimeError, TypeError, ValueError):
        flat = None
    if flat is None or flat.shape != fake.shape:
        expected = f"nested lists in the shape {tuple(fake.shape)}"
        raise source.error(args[2], expected, "these numbers")
    dense = fake.is_contiguous() and fake.untyped_storage().nbytes() == flat.nbytes
    if fake.device.type == "cpu" and dense and not fake.requires_grad:
        return flat
    fake.constant = flat  # type: ignore[attr-defined]
    return fake


def check_name(source: Source, node: ast.expr, taken: Mapping[str, Any]) -> str:
    """The name of an attribute, dotted or not, that is not taken."""
    name = source.string(node)
    parts = name.split(".")
    good = len(name) <= MAX_NAME and all(map(IDENTIFIER.fullmatch, parts))
    above = (taken.get(".".join(parts[:k])) for k in range(1, len(parts)))
    good = good and all(x is None or isinstance(x, torch.nn.Module) for x in above)
    good = good and not any(x == name or x.startswith(f"{name}.") for x in taken)
    if not good or hasattr(fx.GraphModule, parts[0]):
        raise source.error(node, "a name that is not taken", f"the attribute {name[:60]!r}")
    return name

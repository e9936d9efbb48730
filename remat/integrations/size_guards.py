"""Budgets in bytes under dynamic shapes: up to which sizes a plan holds one, so that larger ones are planned anew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from remat import torch_compat
from remat.errors import PlanError
from remat.graph.storages import hint, tensor_bytes
from remat.planning.plan import Plan
from remat.units import format_bytes


def guard_sizes(example_inputs: Sequence[Any], made: Plan, *, saved: bool) -> None:
    """Has Dynamo compile a step again for sizes at which its plan may take more than its budget in bytes.

    Bytes grow with sizes as a power of them, that of the value that grows fastest, and so does no sum of them
    faster: a step that takes half of its budget holds it up to twice the batch that it was planned for.

    Whoever traces without guards, as ``aot_function`` does, compiles nothing again.

    Args:
        example_inputs: what the step was traced with.
        made: its plan, with the figures of the code that runs, and the budget that it was made under.
        saved: whether it is a saved plan, which cannot be made anew.

    Raises:
        PlanError: a saved plan takes more than its budget in bytes at these sizes.
    """
    budget = made.asked
    limit = budget.peak_bytes or budget.nbytes
    if limit is None or made.growth <= 0:
        return
    taken, fixed = made.saved_bytes, 0
    if budget.peak_bytes:
        tensors = [v for v in example_inputs if isinstance(v, torch.Tensor)]
        taken = made.peak_bytes
        fixed = sum(tensor_bytes(v) for v in tensors if not torch_compat.has_symbolic_sizes(v))
    if saved and taken > limit:
        raise PlanError(
            f"the saved plan for '{made.graph}' was made under the budget {budget.label}, and takes "
            f"{format_bytes(taken)} ({taken} bytes) at these sizes; expected sizes at which it takes at most "
            f"{limit} bytes. Plan again at the largest sizes, or under a share, which grows with them"
        )
    if not 0 < taken <= limit:
        return
    larger = ((limit - fixed) / max(1, taken - fixed)) ** (1 / made.growth)
    for size in {size.node.expr: size for size in _sizes(example_inputs)}.values():
        torch._check(size <= max(hint(size), math.floor(hint(size) * larger)))  # type: ignore[no-untyped-call]  # a guard from here on


def _sizes(example_inputs: Sequence[Any]) -> Iterator[torch.SymInt]:
    """The sizes of inputs that may be others the next time."""
    for value in example_inputs:
        found = value.size() if isinstance(value, torch.Tensor) else (value,)
        for size in found:
            if not isinstance(size, torch.SymInt) or size.node.is_nested_int():
                continue
            if size.node.expr.is_Symbol and size.node.has_hint():
                yield size

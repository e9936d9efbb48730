"""Operators that selective checkpointing passes over: estimates do not list them, plans do not count them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

_ALSO = frozenset([torch.ops.aten.lift_fresh.default, torch.ops.aten.clone.default])


def is_skipped(op: Any) -> bool:
    """Whether an operator is neither counted nor decided about; it runs again with the region.

    These are the operators that PyTorch never asks a policy about (detaching, and questions about
    metadata), constants coming in, copies by ``clone``, and the profiler's marks.
    """
    return op in SAC_IGNORED_OPS or op in _ALSO or getattr(op, "namespace", "") == "profiler"

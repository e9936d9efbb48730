"""Keeping the decisions of one region consistent: random operators, and writes in place.

Recomputation is right if every operator that runs again finds what it found in forward. A saved
operator is not run again, so it neither draws its numbers nor writes to its argument. Hence:

* Of random operators, what is recomputed must come before what is saved: recomputation starts from
  the generator's state at the beginning of the region, and a saved operator does not advance it. An
  operator that is not known to be a function of its inputs may draw, and may do more: it is saved unless
  a policy insists, or it writes to what is recomputed.
* What writes to a tensor is saved if the tensor is, and recomputed if it is; and what read the tensor
  before a saved write is saved too, for it would find what was written later.
* What writes to a tensor from outside the region, such as a buffer, is saved: it would be written to
  twice. Whatever is recomputed must find such tensors as they were; otherwise backward is refused, as
  PyTorch refuses it where a saved tensor was written to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat
from remat.errors import PolicyError
from remat.graph.ops import is_known, is_random_call
from remat.graph.purity import name_of
from remat.sac.policies.compose import MUST, SAVE
from remat.sac.run.operators import declared_writes, storages, tensors_in, written
from remat.torch_compat import pytree

_CONSTANT = torch.ops.aten.lift_fresh.default


class RandomOps:
    """The random operators of one run of a region."""

    def __init__(self) -> None:
        self._saved: Any = None

    def settle(
        self, verdict: CheckpointPolicy, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        """The verdict on an operator, made consistent with those before.

        Raises:
            PolicyError: it must be recomputed, and recomputing would give other numbers.
        """
        opaque = not is_known(op)
        if not (opaque or is_random_call(op, args, kwargs)):
            return verdict
        if verdict in SAVE:
            self._saved = op
            return verdict
        if opaque and verdict not in MUST and not _is_in_place(op):
            self._saved = op
            return CheckpointPolicy.PREFER_SAVE
        if _has_generator(args, kwargs):
            why = "it draws from a generator of its own, whose state is not restored"
        elif self._saved is not None:
            why = f"{self._saved} before it is saved, and so draws nothing in recomputation"
        else:
            return verdict
        if verdict in MUST:
            unknown = [x for x in (op, self._saved) if x is not None and not is_known(x)]
            raise PolicyError(
                f"{'' if opaque else 'random '}operator {op} cannot be {verdict.name}: {why}, and the "
                "numbers would be others than in forward; save all random operators of a region, or none"
                + "".join(
                    f". {x} counts as one until it is said to be none: "
                    f"remat.declare_pure('{name_of(x)}')"
                    for x in dict.fromkeys(unknown)
                )
            )
        self._saved = op
        return CheckpointPolicy.PREFER_SAVE


def _has_generator(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))


class Writes:
    """The tensors of one run of a region, and the in-place writes to them."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, bool]] = {}
        self._read: dict[int, Any] = {}
        self._written: set[int] = set()
        # Tensors from outside the region by storage; those that are read again, with the reader.
        self._outside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._versions: dict[int, tuple[Any, int]] = {}

    def settle(
        self, verdict: CheckpointPolicy, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        """The verdict on an operator, made consistent with those before as far as it is a wish."""
        for key in _keys_written(op, args, kwargs):
            maker, kept = self._made.get(key, (None, False))
            if kept and verdict is CheckpointPolicy.PREFER_RECOMPUTE:
                verdict = CheckpointPolicy.PREFER_SAVE
            elif maker is not None and not kept and verdict is CheckpointPolicy.PREFER_SAVE:
                verdict = CheckpointPolicy.PREFER_RECOMPUTE
            elif maker is None and key not in self._read and verdict not in MUST:
                verdict = CheckpointPolicy.PREFER_SAVE
        return verdict

    def record(
        self,
        verdict: CheckpointPolicy,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """Takes note of an operator and its verdict.

        Raises:
            PolicyError: what it writes to is decided otherwise, or was read by something that would
                read it again.
        """
        given = _storages([*args, *kwargs.values()])
        saved = verdict in SAVE
        for key, tensor in given.items():
            if key not in self._made and key not in self._outside and not tensor.is_inference():
                self._outside[key] = weakref.ref(tensor)  # inference tensors count no writes
        for key in _keys_written(op, args, kwargs):
            self._write(op, key, verdict)
        returned = _keys([out])
        # A constant is made anew by each run, though it comes in as an argument.
        made = [k for k in returned if k not in given or op is _CONSTANT]
        for key in made:  # may have been the name of a tensor that is gone
            self._made[key] = (op, saved)
            self._read.pop(key, None)
            self._outside.pop(key, None)
            self._versions.pop(key, None)
        if not saved and (made or not returned):  # a view reads nothing
            changed = _keys(written(op, args, kwargs))
            for key in given:
                self._read[key] = op
                outside = self._outside[key]() if key in self._outside else None
                if outside is not None and key not in changed:
                    self._versions.setdefault(key, (op, torch_compat.version(outside)))

    def _write(self, op: Any, key: int, verdict: CheckpointPolicy) -> None:
        maker, kept = self._made.get(key, (None, False))
        if verdict not in SAVE:
            if kept:
                raise PolicyError(
                    f"{op} cannot be {verdict.name}: it writes to the result of {maker}, which is "
                    "saved; decide both alike"
                )
            return
        if maker is not None and not kept:
            raise PolicyError(
                f"{op} cannot be saved: it writes to the result of {maker}, which is recomputed, and "
                "would not be written to again; decide both alike"
            )
        reader = self._read.get(key)
        if reader is not None:
            raise PolicyError(
                f"{op} cannot be saved: {reader} is recomputed, and would find what {op} writes "
                "instead of what was there before; save both, or recompute both"
            )
        self._written.add(key)

    def check(self) -> None:
        """Check that a tensor read again by recomputation is unchanged.

        Raises:
            PolicyError: a tensor from outside the region was written to since it was read.
        """
        for key, (op, version) in self._versions.items():
            tensor = self._outside[key]()
            if tensor is not None and torch_compat.version(tensor) != version:
                raise PolicyError(
                    f"{op} would be recomputed from other numbers than in forward: a tensor of shape "
                    f"{tuple(tensor.shape)} from outside the region, which it reads, was written to in "
                    "place since; clone it before the region, save what reads it, or write to it "
                    "after backward"
                )

    def accept(self, cache: dict[Any, dict[int, Any]]) -> None:
        """Tell PyTorch's cache that writes within the region are intended.

        From now on, a change to a saved tensor is an error, as ever. What an operator in place
        returns is exempt, for nobody looks at it: a counter that is the caller's goes on counting.
        """
        if not self._written:
            return
        for op, entries in cache.items():
            in_place = _is_in_place(op)
            for entry in pytree.tree_leaves(list(entries.values())):
                value = getattr(entry, "val", None)
                if not isinstance(value, torch.Tensor):
                    continue
                if self._written.issuperset(key for key, _ in storages(value)):
                    entry.version = None if in_place else torch_compat.version(value)


def _keys_written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    return _keys(declared_writes(op, args, kwargs)) if _is_in_place(op) else []


@functools.cache
def _is_in_place(op: Any) -> bool:
    return isinstance(op, torch_compat.OpOverload) and torch_compat.schema(op).is_mutable


def _keys(values: Iterable[Any]) -> list[int]:
    return list(_storages(values))


def _storages(values: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The storages of the tensors in arguments or results, each with the first tensor on it.

    This runs for every operator, so plain tensors are not looked for the general way.
    """
    found: dict[int, torch.Tensor] = {}
    for x in values:
        plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
        if plain and x.layout is torch.strided:
            found.setdefault(torch_compat.storage_id(x.untyped_storage()), x)
        elif isinstance(x, (torch.Tensor, list, tuple)):
            for part in tensors_in(x):
                for key, tensor in storages(part):
                    found.setdefault(key, tensor)
    return found

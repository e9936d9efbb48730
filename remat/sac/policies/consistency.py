"""Keep a region's verdicts (saved or recomputed) consistent for random operators and in-place writes.

A region is the code that one call of `torch.utils.checkpoint.checkpoint` runs. A verdict is the
`CheckpointPolicy` that a policy returns for an operator of the region.

Recomputation is correct if every operator that runs again finds the inputs and the generator state that it had in
forward. A saved operator does not run again, so it neither draws random numbers nor writes to its arguments during
recomputation. Correct recomputation therefore needs four rules:

* Random operators: recomputation starts from the generator state at the beginning of the region,
  and saved operators do not advance that state. So a random operator may be recomputed only if no
  earlier random operator is saved. A custom operator that is not declared pure
  (`remat.declare_pure`) counts as random and may have other side effects. An operator not declared
  pure is saved, unless a MUST verdict forbids this or the operator writes in place.
* Random operators that write their numbers to an argument, such as RReLU's: PyTorch saves the written argument for
  backward before the operator writes. Recomputation stops once it has saved the region's last tensor, and would miss
  the operator's write. After a random operator that writes to an argument, the region therefore saves one more tensor
  at the region's end.
* In-place writes to a tensor made in the region: the writing operator and the operator that made the tensor must both
  be saved, or both be recomputed. If the operators that made and wrote the tensor are saved, every earlier reader of
  the tensor must be saved as well. A recomputed reader would read the written value instead of the earlier one.
* In-place writes to a tensor from outside the region, such as a buffer: the writing operator is
  saved, because recomputation would write a second time. The writing operator is not saved if a
  MUST verdict forbids this, or if a recomputed operator has read the tensor before. If a tensor
  from outside has changed since a recomputed operator read it, backward raises an error, as PyTorch
  does for a modified saved tensor.
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
from remat.graph.memory.writes import written_places
from remat.graph.ops import is_known, is_random_call, is_seeded
from remat.graph.purity import name_of
from remat.sac.policies.compose import MUST, SAVE
from remat.sac.run.operators import declared_writes, storages, tensors_in, written_tensors
from remat.torch_compat import pytree

_CONSTANT = torch.ops.aten.lift_fresh.default


class RandomOps:
    """Track the random operators of one run of a region, to decide which of them must be saved.

    Attributes:
        wrote_argument: whether the run contains an operator for which `draws_into_argument` is true.
    """

    def __init__(self) -> None:
        self.wrote_argument = False
        self._saved: Any = None  # the last saved operator that may have drawn random numbers

    def adjust(
        self, verdict: CheckpointPolicy, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        """Return an operator's verdict (saved or recomputed), adjusted to the verdicts for earlier random operators.

        A PREFER verdict becomes PREFER_SAVE in two cases: recomputation would draw other random numbers than forward
        did, or the operator is neither declared pure nor in-place.

        Raises:
            PolicyError: a MUST verdict demands a recomputation that would draw other random numbers than forward did.
        """
        opaque = not is_known(op)
        if not (opaque or is_random_call(op, args, kwargs)):
            return verdict
        self.wrote_argument |= draws_into_argument(op)
        if verdict in SAVE:
            self._saved = op
            return verdict
        # An operator that is not declared pure may have side effects, so it runs once.
        if opaque and verdict not in MUST and not written_places(op):
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


@functools.cache
def draws_into_argument(op: Any) -> bool:
    """Whether a random operator writes to an argument that it does not return, such as RReLU's ``noise``."""
    if not is_seeded(op):
        return False
    # Autograd saves an argument before the operator runs, and a result after the operator has run.
    schema = torch_compat.schema(op)
    returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}
    writes = [schema.arguments[k].alias_info for k, _ in written_places(op)]
    return any(info is not None and returned.isdisjoint(info.before_set) for info in writes)


def _has_generator(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is a `torch.Generator`, whose state checkpointing does not restore."""
    return any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))


class Writes:
    """Track the tensors of one run of a region, to keep in-place writes to these tensors consistent."""

    def __init__(self) -> None:
        # Keys are storage ids. `_makers`: the operator that made the tensor, and whether this operator is saved.
        # `_read`: the last recomputed reader. `_saved_writes`: storages that saved operators wrote to.
        # `_versions`: the first recomputed reader, and the tensor's version at that read.
        self._makers: dict[int, tuple[Any, bool]] = {}
        self._read: dict[int, Any] = {}
        self._saved_writes: set[int] = set()
        # Tensors from outside the region; weak, so that tracking does not extend their lifetimes.
        self._outside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._versions: dict[int, tuple[Any, int]] = {}

    def adjust(
        self, verdict: CheckpointPolicy, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        """Return an operator's verdict (saved or recomputed), adjusted to the operator's in-place writes.

        Only PREFER verdicts change. A write to a tensor made in the region is saved if the operator that
        made the tensor is saved, and recomputed otherwise.
        """
        for key in _keys(declared_writes(op, args, kwargs)):
            maker, maker_is_saved = self._makers.get(key, (None, False))
            if maker_is_saved and verdict is CheckpointPolicy.PREFER_RECOMPUTE:
                verdict = CheckpointPolicy.PREFER_SAVE
            elif (
                maker is not None and not maker_is_saved and verdict is CheckpointPolicy.PREFER_SAVE
            ):
                verdict = CheckpointPolicy.PREFER_RECOMPUTE
            # A recomputed write to a tensor from outside the region would be a second write.
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
        """Record the tensors that an operator made, read and wrote, with the operator's adjusted verdict.

        Raises:
            PolicyError: the verdict for an in-place write contradicts that of the operator that made the
                tensor, or of an earlier reader.
        """
        arguments = _storages([*args, *kwargs.values()])
        saved = verdict in SAVE
        # Inference tensors are left out, because they have no version counter.
        for key, tensor in arguments.items():
            if key not in self._makers and key not in self._outside and not tensor.is_inference():
                self._outside[key] = weakref.ref(tensor)
        for key in _keys(declared_writes(op, args, kwargs)):
            self._write(op, key, verdict)
        returned = _keys([out])
        # The argument that `lift_fresh` returns counts as made here, because each run creates the constant anew.
        created = [k for k in returned if k not in arguments or op is _CONSTANT]
        for key in created:  # forget an earlier, freed storage with the same id
            self._makers[key] = (op, saved)
            self._read.pop(key, None)
            self._outside.pop(key, None)
            self._versions.pop(key, None)
        if not saved and (
            created or not returned
        ):  # views are left out, since they read no elements
            changed = _keys(written_tensors(op, args, kwargs))
            for key in arguments:
                self._read[key] = op
                outside = self._outside[key]() if key in self._outside else None
                if outside is not None and key not in changed:
                    self._versions.setdefault(key, (op, torch_compat.version(outside)))

    def _write(self, op: Any, key: int, verdict: CheckpointPolicy) -> None:
        """Check the verdict of an operator that writes to storage ``key``; record the write of a saved operator."""
        maker, maker_is_saved = self._makers.get(key, (None, False))
        if verdict not in SAVE:
            if maker_is_saved:
                raise PolicyError(
                    f"{op} cannot be {verdict.name}: it writes to the result of {maker}, which is "
                    "saved; decide both alike"
                )
            return
        if maker is not None and not maker_is_saved:
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
        self._saved_writes.add(key)

    def check(self) -> None:
        """Raise a PolicyError if a tensor from outside the region changed after a recomputed operator read it."""
        for key, (op, version) in self._versions.items():
            tensor = self._outside[key]()
            if tensor is not None and torch_compat.version(tensor) != version:
                raise PolicyError(
                    f"{op} would be recomputed from other numbers than in forward: a tensor of shape "
                    f"{tuple(tensor.shape)} from outside the region, which it reads, was written to in "
                    "place since; clone it before the region, save what reads it, or write to it "
                    "after backward"
                )

    def accept(self, cache: dict[Any, Any]) -> None:
        """Let PyTorch's cache of results accept the writes of saved operators; later writes still raise errors."""
        if not self._saved_writes:
            return
        # In backward, PyTorch compares each saved tensor's version with the version in its cache entry.
        # For an in-place operator, PyTorch returns the argument and ignores the cached result. So a step
        # counter that the region increments may change again before backward.
        for op, entries in cache.items():
            in_place = bool(written_places(op))
            for entry in pytree.tree_leaves(entries):  # lists by operator before PyTorch 2.13
                value = getattr(entry, "val", None)
                if not isinstance(value, torch.Tensor):
                    continue
                if self._saved_writes.issuperset(key for key, _ in storages(value)):
                    entry.version = None if in_place else torch_compat.version(value)


def _keys(values: Iterable[Any]) -> list[int]:
    return list(_storages(values))


def _storages(values: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Return a dict from the id of each storage in ``values`` to the first tensor on the storage."""
    tensors: dict[int, torch.Tensor] = {}
    for x in values:
        # A fast path, because this function runs for every operator.
        plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
        if plain and x.layout is torch.strided:
            tensors.setdefault(torch_compat.storage_id(x.untyped_storage()), x)
        elif isinstance(x, (torch.Tensor, list, tuple)):
            for part in tensors_in(x):
                for key, tensor in storages(part):
                    tensors.setdefault(key, tensor)
    return tensors

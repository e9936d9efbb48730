"""Writing down every operator that forward runs, with the memory that it reads, writes and makes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph import ops
from remat.sac.run.module_calls import in_backward
from remat.sac.run.operators import (
    allocated_bytes,
    is_skipped,
    storages,
    tensors_in,
    written,
)
from remat.torch_compat import pytree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One operator that ran. Storages are told apart by a number.

    Attributes:
        op: the operator.
        node: the call as a node, for cost models.
        parts: what really runs: the call itself, or what the tensor subclasses it is given do.
        reads: storages of its arguments.
        writes: those that it writes to.
        returns: storages of its results.
        made: storages that it allocates, with their bytes.
        skipped: whether checkpointing passes over it.
        is_view: whether it returns nothing but views of its arguments.
        is_random: whether it draws random numbers.
        is_opaque: whether it is not known to be a function of its inputs, and may draw too.
    """

    op: Any
    node: fx.Node
    parts: tuple[fx.Node, ...]
    reads: frozenset[int]
    writes: tuple[int, ...]
    returns: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    skipped: bool
    is_view: bool
    is_random: bool
    is_opaque: bool = False

    @property
    def name(self) -> str:
        """As in ``aten.mm.default``."""
        return str(self.op)


class Recorder(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run in forward; those of backward are let through.

    Attributes:
        calls: what ran, in order.
        inside: names of the modules that are running, outermost first; for messages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.inside: list[str] = []
        self._nodes = _Nodes()
        self._device: torch.device | None = None
        mode = torch_compat.active_fake_mode()
        self._converts = mode if mode is not None and mode.allow_non_fake_inputs else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if in_backward():
            return func(*args, **kwargs)
        if self._converts is not None and not is_skipped(func):
            # Real parameters: what the mode puts in their place must be the same every time.
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.fake, (args, kwargs))
        if not any(map(torch_compat.is_traceable_wrapper_subclass_type, types)):
            out = func(*args, **kwargs)
            self._add(func, args, kwargs, out, None)
            return out
        parts = _Parts(self._nodes)
        with parts:
            out = func(*args, **kwargs)
        self._add(func, args, kwargs, out, tuple(parts.found))
        return out

    def _add(
        self, op: Any, args: Any, kwargs: Any, out: Any, parts: tuple[fx.Node, ...] | None
    ) -> None:
        results, skipped = tensors_in(out), is_skipped(op)
        if skipped and not results:
            return
        self._check_device(op, results)
        node = self._nodes.call(op, args, kwargs, out)
        reads = frozenset(k for t in tensors_in((args, kwargs)) for k, _, _ in storages(t))
        changed = written(op, args, kwargs)
        returned = {k: allocated_bytes(n, d) for t in results for k, n, d in storages(t)}
        self.calls.append(
            Call(
                op=op,
                node=node,
                parts=(node,) if parts is None else parts,
                reads=reads,
                writes=tuple(dict.fromkeys(k for t in changed for k, _, _ in storages(t))),
                returns=tuple(returned),
                made=tuple((k, n) for k, n in returned.items() if k not in reads),
                skipped=skipped,
                is_view=not changed and bool(returned) and reads.issuperset(returned),
                is_random=ops.is_random(node),
                is_opaque=ops.is_opaque(node),
            )
        )

    def fake(self, x: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in a fake mode that takes real ones."""
        if self._converts is None or torch_compat.is_fake(x):
            return x
        return self._converts.from_tensor(x)

    def _check_device(self, op: Any, results: Sequence[torch.Tensor]) -> None:
        for result in results:
            if result.dim() == 0 and result.device.type == "cpu":
                continue  # a number that comes along
            if self._device is None:
                self._device = result.device
            elif result.device != self._device:
                where = f"module '{self.inside[-1]}'" if self.inside else "outside of all modules"
                raise ProblemError(
                    f"{where}: {op} makes a tensor on {result.device}, and those before it are on "
                    f"{self._device}; expected a model on one device: estimate each part by itself"
                )


class _Parts(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What tensor subclasses do when they are given an operator."""

    def __init__(self, nodes: _Nodes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[fx.Node] = []
        self._nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(torch_compat.is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_skipped(func):
            self.found.append(self._nodes.call(func, args, kwargs, out))
        return out


class _Nodes:
    """Calls as nodes of a graph. Nothing in it is connected: tensors are placeholders.

    The graph keeps all tensors alive, so that no two have the same identity.
    """

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._known: dict[int, fx.Node] = {}

    def call(self, op: Any, args: Any, kwargs: Any, out: Any) -> fx.Node:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._tensor, (tuple(args), kwargs))
        node = self._graph.call_function(op, args, kwargs)
        node.meta["val"] = out
        return node

    def _tensor(self, x: torch.Tensor) -> fx.Node:
        known = self._known.get(id(x))
        if known is None:
            known = self._known[id(x)] = self._graph.placeholder("x")
            known.meta["val"] = x
        return known


def without_replays(calls: Sequence[Call], returned: Iterable[torch.Tensor]) -> list[Call]:
    """The same calls, with those that fake tensors alone take marked as skipped.

    After a write to its memory, autograd makes a view again, for its place in the graph of the
    gradient. For plain tensors it works that out without running anything; for tensor subclasses, and
    fake tensors are one, it runs the view's operators on the new base and drops the result. Where the
    model's own tensors are plain, no policy is ever asked about these, so they may not be counted.
    Such a call makes a view that was there before, of memory that was written since, and nobody
    uses it.

    Args:
        calls: what ran, in order.
        returned: all tensors that modules returned.
    """
    suspects = _made_again(calls)
    used = set(map(id, returned))
    found = list(calls)
    for i in reversed(range(len(calls))):
        node = calls[i].node
        if i in suspects and used.isdisjoint(map(id, tensors_in(node.meta["val"]))):
            found[i] = replace(calls[i], skipped=True)
        else:
            used.update(id(n.meta["val"]) for n in node.all_input_nodes)
    return found


def _made_again(calls: Sequence[Call]) -> set[int]:
    """Calls that make a view of written memory as an earlier call did before that was written."""
    first: dict[Hashable, int] = {}
    written: dict[int, int] = {}
    again: set[int] = set()
    for i, call in enumerate(calls):
        written.update(dict.fromkeys(call.writes, i))
        if not call.is_view or call.parts != (call.node,):
            continue
        looks = _looks(call.op, call.node, call.returns)
        since = first.setdefault(looks, i)
        if any(written.get(key, -1) > since for key in call.returns):
            again.add(i)
    return again


def _looks(op: object, node: fx.Node, storages: tuple[int, ...]) -> Hashable:
    """A view by what it shows of which memory; views of one operator that look alike are equal."""
    shown = [
        (tuple(map(str, t.shape)), tuple(map(str, t.stride())), str(t.storage_offset()))
        for t in tensors_in(node.meta["val"])
    ]
    return (str(op), storages, tuple(shown))

"""Keep fake values on the right storages, so that views share memory with their bases, while passes rewrite graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from remat.graph.capture.tokens import operators
from remat.graph.index import inputs_of
from remat.graph.memory.storages import (
    Memories,
    fake_mode_of,
    hint,
    leaves_of,
    storage_bytes,
    storage_key,
    tensor_bytes,
)
from remat.graph.memory.writes import aliased_argument, by_target, may_alias

#: Operators whose kernels copy the whole storage of their first argument and write into the copy.
_COPY_WHOLE = operators("copy select_scatter slice_scatter diagonal_scatter as_strided_scatter")


def refresh(node: fx.Node, mode: Any = None) -> None:
    """Recompute the fake value of a node, ``meta["val"]``, from the fake values of its inputs.

    Args:
        node: the node, which stays unchanged if neither ``mode`` nor an input gives a fake mode.
        mode: fake mode to compute in. None: use the fake mode of the inputs.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = mode or fake_mode_of((args, kwargs))
    if mode is None:
        return
    with _quietly(mode):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def cloned(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on a new storage; the copy of a fake tensor is fake."""
    fake = getattr(value, "fake_mode", None)
    if fake is None:
        return value.clone()
    with fake, torch.no_grad():
        return value.detach().clone()


def repair_aliases(
    graph: fx.Graph, memories: Memories | None = None, *, by_kernel: bool = False
) -> int:
    """Recompute the fake value of every view that does not share the storage of its base.

    The base of a view is the argument whose memory the view shows. If a pass replaces the base, as
    Inductor's pattern matcher does, the view's fake value stays on the storage of the removed node.

    Args:
        memories: cache of the storage of each value; None: use a new cache.
        by_kernel: whether to enlarge the fake storages of copies and scatters to the size that
            PyTorch's kernels allocate, as in a graph that runs operator by operator.

    Returns:
        Number of fake values that were recomputed.
    """
    repaired = 0
    memory = (memories or Memories()).key

    def key(node: fx.Node) -> int | None:
        return memory(node.meta.get("val"))

    nodes = list(graph.nodes)
    kernels = _COPY_WHOLE if by_kernel else ()
    # The first argument of such a call may be a view of a larger storage. PyTorch's kernel then copies the whole
    # storage, but the fake result has a storage for its own elements only. Inductor's kernels allocate no more than
    # those.
    copies = {n for t in kernels for n in graph.find_nodes(op="call_function", target=t)}
    # In graph order, because a repaired view may be the base of a later view.
    for node, is_view in zip(nodes, by_target(nodes, may_alias), strict=True):
        if node in copies and _copy_whole(node):
            repaired += 1
        base = aliased_argument(node) if is_view else None
        if base is None or _moves(node):
            continue
        own_key = key(node)
        if own_key is not None and own_key == key(base):
            continue
        own_keys, base_keys = _keys(node.meta.get("val")), _keys(base.meta.get("val"))
        if own_keys and base_keys and not own_keys <= base_keys:
            refresh(node)
            repaired += 1
    return repaired


def refresh_views(graph: fx.Graph, new: Iterable[fx.Node], gone: Collection[int]) -> None:
    """Recompute the fake values of views that still use the storage of a replaced node.

    Args:
        new: the replacements, which former readers of the replaced nodes read now.
        gone: storage keys (see `storage_key`) of the replaced nodes.
    """
    stale = set(new)
    for node in graph.nodes:
        if stale.isdisjoint(inputs_of(node)) or node.op != "call_function" or _moves(node):
            continue
        # Storages also reveal views that the operators' schemas do not declare.
        if not _keys(node.meta.get("val")).isdisjoint(gone):
            refresh(node)
            stale.add(node)


def _moves(node: fx.Node) -> bool:
    """Return whether a call changes the shape or storage of an argument in place."""
    # Running such a call again on fake values would repeat the change.
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _copy_whole(node: fx.Node) -> bool:
    """Enlarge the fake result of a scatter or copy to the size that the kernel allocates; return whether it grew."""
    base: Any = node.args[0].meta.get("val")  # type: ignore[union-attr]
    places = zip(base.size(), base.stride(), strict=True)
    if any(hint(n) > 1 and hint(step) == 0 for n, step in places):
        return False  # overlapping elements (stride 0): the kernel copies the view's elements only
    nbytes = storage_bytes(base)
    if nbytes <= max(storage_bytes(node.meta.get("val")), tensor_bytes(base)):
        return False
    with _quietly(base.fake_mode):
        buffer = base.new_empty(base.untyped_storage().nbytes() // base.element_size())
        node.meta["val"] = buffer.as_strided(base.size(), base.stride(), base.storage_offset())
    return True


@contextlib.contextmanager
def _quietly(fake: Any) -> Iterator[None]:
    """Activate a fake mode in a ``with`` block, without gradients and without shape guards."""
    env = getattr(fake, "shape_env", None)
    quiet = env.suppress_guards() if env is not None else contextlib.nullcontext()
    with fake, quiet, torch.no_grad():
        yield


def _keys(value: Any) -> set[int]:
    return {k for v in leaves_of(value) if (k := storage_key(v)) is not None}

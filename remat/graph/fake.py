"""Fake values that show what aliases what, kept true while graphs are rewritten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from remat.graph.storages import (
    Memories,
    fake_mode_of,
    hint,
    leaves_of,
    storage_bytes,
    storage_key,
    tensor_bytes,
)
from remat.graph.writes import aliased_arguments

_aten = torch.ops.aten
#: Operators whose kernels copy all memory behind their first argument, and write into that copy.
_COPY_WHOLE = (
    _aten.copy.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default,
)


def refresh(node: fx.Node, mode: Any = None) -> None:
    """Computes the fake value of a node anew from those of its inputs, in their mode unless another is given."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = mode or fake_mode_of((args, kwargs))
    if mode is None:
        return
    with _quietly(mode):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def cloned(value: torch.Tensor) -> torch.Tensor:
    """A fake copy in memory of its own."""
    fake = getattr(value, "fake_mode", None)
    if fake is None:
        return value.clone()
    with fake, torch.no_grad():
        return value.detach().clone()


def repair_aliases(
    graph: fx.Graph, memories: Memories | None = None, *, by_kernel: bool = False
) -> int:
    """Refreshes every view whose fake value does not share its base's memory.

    Passes that swap a view's base (Inductor's pattern matcher, for one) leave the view's value on
    the memory of a node that is gone.

    A scatter or a copy into a view is in PyTorch's kernel a copy of all the memory that the view looks into,
    and the same view of that copy. The fake kernel, or the cache of its results, knows only of the view's own
    elements.

    Args:
        graph: the graph.
        memories: the memory behind its values, as far as it is known.
        by_kernel: give scatters and copies the memory that PyTorch's kernels give them, for a graph that runs
            operator by operator; Inductor's kernels write what is asked for and no more.

    Returns:
        How many values were refreshed.
    """
    repaired = 0
    nodes = list(graph.nodes)
    found = (memories or Memories()).of_all([n.meta.get("val") for n in nodes])
    key_of = {n: key for n, (key, _, _) in zip(nodes, found, strict=True)}
    kernels = _COPY_WHOLE if by_kernel else ()
    copies = {n for t in kernels for n in graph.find_nodes(op="call_function", target=t)}
    for node, base in zip(nodes, aliased_arguments(nodes), strict=True):
        if node in copies and _copy_whole(node):
            key_of[node] = storage_key(node.meta.get("val"))
            repaired += 1
        if (
            base is None
            or _moves(node)
            or (key_of[node] is not None and key_of[node] == key_of[base])
        ):
            continue
        mine, theirs = _keys(node.meta.get("val")), _keys(base.meta.get("val"))
        if mine and theirs and not mine <= theirs:
            refresh(node)
            key_of[node] = storage_key(node.meta.get("val"))
            repaired += 1
    return repaired


def _moves(node: fx.Node) -> bool:
    """Whether a call gives an argument another shape or memory: on fake values it would do so again."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _copy_whole(node: fx.Node) -> bool:
    """Gives a result the memory behind the view that is written to; False: it has as much already."""
    base: Any = node.args[0].meta.get("val")  # type: ignore[union-attr]
    places = zip(base.size(), base.stride(), strict=True)
    if any(hint(n) > 1 and hint(step) == 0 for n, step in places):
        return False  # elements share memory: the kernel copies these alone
    nbytes = storage_bytes(base)
    if nbytes <= max(storage_bytes(node.meta.get("val")), tensor_bytes(base)):
        return False
    with _quietly(base.fake_mode):
        whole = base.new_empty(base.untyped_storage().nbytes() // base.element_size())
        node.meta["val"] = whole.as_strided(base.size(), base.stride(), base.storage_offset())
    return True


@contextlib.contextmanager
def _quietly(fake: Any) -> Iterator[None]:
    """Runs operators on fake tensors, and guards against nothing that they ask."""
    env = getattr(fake, "shape_env", None)
    quiet = env.suppress_guards() if env is not None else contextlib.nullcontext()
    with fake, quiet, torch.no_grad():
        yield


def _keys(value: Any) -> set[int]:
    return {k for v in leaves_of(value) if (k := storage_key(v)) is not None}

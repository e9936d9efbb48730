"""Fake values that show what aliases what, kept true while graphs are rewritten."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.graph.memories import Memories
from remat.graph.storages import aliased_arguments, storage_key


def refresh(node: fx.Node) -> None:
    """Computes the fake value of a node anew from those of its inputs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fake = next(
        (v.fake_mode for v in pytree.tree_leaves((args, kwargs)) if hasattr(v, "fake_mode")), None
    )
    if fake is None:
        return
    env = getattr(fake, "shape_env", None)
    quiet = env.suppress_guards() if env is not None else contextlib.nullcontext()
    with fake, quiet, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def repair_aliases(graph: fx.Graph, memories: Memories | None = None) -> int:
    """Refreshes every view whose fake value does not share its base's memory.

    Passes that swap a view's base (Inductor's pattern matcher, for one) leave the view's value on
    the memory of a node that is gone.

    Args:
        graph: the graph.
        memories: the memory behind its values, as far as it is known.

    Returns:
        How many values were refreshed.
    """
    repaired = 0
    nodes = list(graph.nodes)
    found = (memories or Memories()).of_all([n.meta.get("val") for n in nodes])
    key_of = {n: key for n, (key, _, _) in zip(nodes, found, strict=True)}
    for node, base in zip(nodes, aliased_arguments(nodes), strict=True):
        if base is None or (key_of[node] is not None and key_of[node] == key_of[base]):
            continue
        mine, theirs = _keys(node.meta.get("val")), _keys(base.meta.get("val"))
        if mine and theirs and not mine <= theirs:
            refresh(node)
            key_of[node] = storage_key(node.meta.get("val"))
            repaired += 1
    return repaired


def _keys(value: Any) -> set[int]:
    leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return {k for v in leaves if (k := storage_key(v)) is not None}

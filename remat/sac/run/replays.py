"""Views that only fake tensors take: autograd makes a view again after its memory was written.

It needs the view's place in the graph of the gradient. For plain tensors it works that out without
running anything; for tensor subclasses, and fake tensors are one, it runs the view's operators on
the new base and drops the result. Where the model's own tensors are plain, no policy will ever be
asked about these, so they may not be counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import fx

from remat.sac.run.recording import Call, tensors_in


def without_replays(calls: Sequence[Call], returned: Iterable[torch.Tensor]) -> list[Call]:
    """The same calls, with those that fake tensors alone take marked as skipped.

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
            found[i] = dataclasses.replace(calls[i], skipped=True)
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

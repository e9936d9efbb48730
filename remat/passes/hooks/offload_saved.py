"""Pass that copies the saved values listed in a decision to the host, and fetches the copies in backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat import torch_compat
from remat.errors import PlanError
from remat.graph.joint import output_node
from remat.graph.memory.host_copies import OFFLOAD, RELOAD, WAIT_COPIED, offload, reload
from remat.graph.problems.lowering import Offload
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State, partitioned_graphs
from remat.passes.hooks.inlining import Inlining
from remat.passes.hooks.saved_tensor_hooks import HookTraces, SavedTensors
from remat.passes.hooks.tracing import Traced
from remat.passes.packing.pairs import SavedTensorHooks

#: Hooks that start copies to and from the host. `wait_for_copies` inserts the waits for these copies.
OFFLOADING = SavedTensorHooks(
    name="offload",
    pack=lambda x: (offload(x), x.device),
    unpack=lambda packed: reload(*packed),
)


@dataclass(frozen=True)
class OffloadSaved(Pass):
    """Copy the saved values in the decision's ``offloads`` to the host's memory, and back to the device in backward.

    The copy to the host begins after an offloaded value's last use in forward. The value's device
    memory is freed after the node that `Offload.freed_after` names. The copy from the host to the
    device begins before the node that `Offload.fetched_before` names. If ``freed_after`` is empty,
    forward waits for the copy to the host as soon as the copy has begun. If ``fetched_before`` is
    empty, backward begins the copy to the device right before the value's first use.
    """

    name: ClassVar[str] = "offload-saved"
    stage: ClassVar[Stage] = Stage.SPLIT

    def run(self, state: State) -> PassResult:
        offloads = () if state.decision is None else state.decision.offloads
        if not offloads:
            return PassResult(state=state, modified=False, detail="no saved value is offloaded")
        forward, backward = partitioned_graphs(state, self.name)
        traced, refused = traced_offloads(state, offloads)
        if refused:
            name, why = next(iter(refused.items()))
            raise PlanError(
                f"the plan offloads '{name}' of graph '{state.joint.name}', which cannot be: {why}; plan again"
            )
        with state.edit() as edit:
            inlining = Inlining(forward, backward, state.joint.num_fwd_outputs)
            for saved, hooks in traced:
                inlining.add(saved, hooks)
            inlining.finish()
            wait_for_copies(forward, backward, offloads)
        return edit.result(f"{len(offloads)} values offloaded", offloaded=len(offloads))


def traced_offloads(
    state: State, offloads: Iterable[Offload]
) -> tuple[list[tuple[fx.Node, Traced]], dict[str, str]]:
    """Trace, for each value to offload, its copy to the host and the copy back to the device.

    Returns:
        A list and a dict. The list has pairs of a saved value's node in forward and the value's
        traced copies (``pack``: to the host; ``unpack``: to the device). The dict maps the name of
        each value that cannot be offloaded to the reason.

    Raises:
        PlanError: the state is not partitioned.
    """
    forward, backward = partitioned_graphs(state, OffloadSaved.name)
    saved_tensors = SavedTensors(state.joint, forward, backward, state.get(HookTraces(OFFLOADING)))
    by_name = {n.name: n for n in saved_tensors.tensors}
    offloaded: list[tuple[fx.Node, Traced]] = []
    refused: dict[str, str] = {}
    for value in offloads:
        saved = by_name.get(value.name)
        if saved is None:
            refused[value.name] = "forward does not hand it over"
            continue
        traced = saved_tensors.traced(saved)
        if isinstance(traced, str):
            refused[value.name] = traced
        else:
            offloaded.append((saved, traced))
    return offloaded, refused


def wait_for_copies(
    forward: fx.GraphModule, backward: fx.GraphModule, offloads: Iterable[Offload]
) -> None:
    """Make both graphs wait for the copies of offloaded values, and begin each copy to the device at its planned node.

    Args:
        forward: the forward module, which begins the copies to the host.
        backward: the backward module, which begins the copies to the device.
        offloads: the offloaded values. Each entry names the node after which forward waits for the
            copy to the host, and the node before which backward begins the copy to the device.

    Raises:
        PlanError: an offload names a node that the graph does not have.
    """
    copies = {str(n.meta.get("packed_from")): n for n in forward.graph.nodes if n.target is OFFLOAD}
    fetched = {n.args[0].name: n for n in backward.graph.nodes if n.target is RELOAD}
    named = {n.name: n for n in forward.graph.nodes}, {n.name: n for n in backward.graph.nodes}
    rank, late = ({n: i for i, n in enumerate(gm.graph.nodes)} for gm in (forward, backward))
    out = output_node(forward.graph)
    tail: dict[fx.Node, fx.Node] = {}
    for value in offloads:
        copy, name = copies[value.name], copies[value.name].name
        anchor = _node(named[0], value.freed_after, copy)
        # A copy cannot be waited for before it begins.
        anchor = max(anchor, copy, key=rank.__getitem__)
        torch_compat.rename(copy, f"{name}_begun")
        torch_compat.used_names(forward.graph).discard(name)  # the waiting node gets this name
        with forward.graph.inserting_after(tail.get(anchor, anchor)):
            end = forward.graph.call_function(WAIT_COPIED, (copy, copy.args[0]))
        tail[anchor] = end
        end.meta = dict(copy.meta)
        torch_compat.rename(end, name)
        out.replace_input_with(copy, end)

        back = fetched[name]
        first = min(back.users, key=late.__getitem__)
        before = _node(named[1], value.fetched_before, back)
        torch_compat.rename(back, f"{back.name}_begun")
        with backward.graph.inserting_before(first):
            wait = backward.graph.call_function(WAIT_COPIED, (back, back.args[0]))
        wait.meta = dict(back.meta)
        back.replace_all_uses_with(wait, delete_user_cb=lambda user, own=wait: user is not own)
        if before is not back:
            before.prepend(back)


def _node(named: dict[str, fx.Node], name: str, otherwise: fx.Node) -> fx.Node:
    """Return the node called ``name``, or ``otherwise`` if ``name`` is empty."""
    if not name:
        return otherwise
    if name not in named:
        raise PlanError(
            f"the plan places a copy at '{name}', which neither forward nor backward runs; plan again"
        )
    return named[name]

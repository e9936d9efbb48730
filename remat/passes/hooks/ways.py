"""Saved values that are packed, or sent to the host's memory and fetched again, where a decision says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat import torch_compat
from remat.errors import PlanError
from remat.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPIED, offload, reload
from remat.graph.joint import output_node
from remat.graph.lowering import Way
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State, halves_of
from remat.passes.hooks.inlining import Inlining
from remat.passes.hooks.saved_tensor_hooks import Handed, HookTraces, refusal_once_traced
from remat.passes.hooks.tracing import Traced
from remat.passes.packing.pairs import SavedTensorHooks

#: Offloading as a pair of hooks; the copies are waited for where a `Way` says.
OFFLOADING = SavedTensorHooks(
    name="offload",
    pack=lambda x: (offload(x), x.device),
    unpack=lambda packed: reload(*packed),
)


def pair_of(way: Way) -> SavedTensorHooks:
    """The hooks of a way."""
    return SavedTensorHooks.of(way.pair) if way.pair else OFFLOADING


@dataclass(frozen=True)
class KeepInWays(Pass):
    """Packs and offloads the saved values that the decision has a way for.

    Packing stands as in `saved-tensor-hooks`. What is offloaded is sent behind its last use in forward, and
    its memory is free behind the node that the way names; its fetch begins before the one that it names.
    """

    name: ClassVar[str] = "keep-in-ways"
    stage: ClassVar[Stage] = Stage.SPLIT
    keeps_numbers: ClassVar[bool] = False
    summary: ClassVar[str] = "pack and offload what the decision says"

    def run(self, state: State) -> PassResult:
        ways = () if state.decision is None else state.decision.ways
        if not ways:
            return PassResult(state=state, modified=False, detail="every saved value is just kept")
        forward, backward = halves_of(state, self.name)
        chosen, left = sorted_out(state, ways)
        if left:
            name, why = next(iter(left.items()))
            raise PlanError(
                f"the plan packs or offloads '{name}' of graph '{state.joint.name}', which cannot be: {why}; "
                "plan again"
            )
        with state.edit() as edit:
            inlining = Inlining(forward, backward, state.joint.num_fwd_outputs)
            for _, saved, traced in chosen:
                inlining.add(saved, traced)
            inlining.finish()
            wait_for_copies(forward, backward, ways)
        offloaded = sum(not way.pair for way in ways)
        return edit.result(
            f"{len(ways) - offloaded} values packed, {offloaded} offloaded",
            packed=len(ways) - offloaded,
            offloaded=offloaded,
        )


def sorted_out(
    state: State, ways: Iterable[Way]
) -> tuple[list[tuple[Way, fx.Node, Traced]], dict[str, str]]:
    """The ways that can be carried out in the two halves, and why others cannot, by name.

    Raises:
        PlanError: the state is not partitioned.
    """
    forward, backward = halves_of(state, KeepInWays.name)
    handed = Handed(state.joint, forward, backward)
    by_name = {n.name: n for n in handed.tensors}
    done: list[tuple[Way, fx.Node, Traced]] = []
    left: dict[str, str] = {}
    for way in ways:
        saved, hooks = by_name.get(way.name), pair_of(way)
        if saved is None:
            left[way.name] = "forward does not hand it over"
            continue
        why = handed.refusal(saved, hooks)
        traced = None if why else state.get(HookTraces(hooks)).of(saved.meta["val"])
        why = why or refusal_once_traced(saved, traced, hooks)
        if traced is None or why:
            left[way.name] = why
        else:
            done.append((way, saved, traced))
    return done, left


def wait_for_copies(forward: fx.GraphModule, backward: fx.GraphModule, ways: Iterable[Way]) -> None:
    """Puts waits for the copies of halves that begin them, and begins fetches where the ways say."""
    sent = {str(n.meta.get("packed_from")): n for n in forward.graph.nodes if n.target is OFFLOAD}
    fetched = {n.args[0].name: n for n in backward.graph.nodes if n.target is RELOAD}
    named = {n.name: n for n in forward.graph.nodes}, {n.name: n for n in backward.graph.nodes}
    rank, late = ({n: i for i, n in enumerate(half.graph.nodes)} for half in (forward, backward))
    out = output_node(forward.graph)
    tail: dict[fx.Node, fx.Node] = {}
    for way in ways:
        if way.pair:
            continue
        copy, name = sent[way.name], sent[way.name].name
        anchor = _node(named[0], way.freed_after, copy)
        anchor = max(anchor, copy, key=rank.__getitem__)
        torch_compat.rename(copy, f"{name}_begun")
        torch_compat.used_names(forward.graph).discard(name)  # what is handed over has it now
        with forward.graph.inserting_after(tail.get(anchor, anchor)):
            end = forward.graph.call_function(WAIT_COPIED, (copy, copy.args[0]))
        tail[anchor] = end
        end.meta = dict(copy.meta)
        torch_compat.rename(end, name)
        out.replace_input_with(copy, end)

        back = fetched[name]
        first = min(back.users, key=late.__getitem__)
        before = _node(named[1], way.fetched_before, back)
        torch_compat.rename(back, f"{back.name}_begun")
        with backward.graph.inserting_before(first):
            there = backward.graph.call_function(WAIT_COPIED, (back, back.args[0]))
        there.meta = dict(back.meta)
        back.replace_all_uses_with(there, delete_user_cb=lambda user, own=there: user is not own)
        if before is not back:
            before.prepend(back)


def _node(named: dict[str, fx.Node], name: str, otherwise: fx.Node) -> fx.Node:
    if not name:
        return otherwise
    if name not in named:
        raise PlanError(
            f"the plan places a copy at '{name}', which its halves do not run; plan again"
        )
    return named[name]

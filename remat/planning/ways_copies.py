"""Where the copies of offloaded values stand in the two halves of a step, and how long runs wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import fx

from remat.errors import PlanError
from remat.graph.copying import run_of
from remat.graph.costs.links import Link
from remat.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPIED
from remat.graph.liveness import StepWalk, sums_of
from remat.graph.lowering import Way
from remat.passes.core.state import State
from remat.planning.ways_prices import Times
from remat.solvers.transfers import Transfer, place, waited_at

_COPIES = (OFFLOAD, RELOAD, WAIT_COPIED)


class Copies:
    """The copies of two halves in which each stands at its value's last use in forward and first in backward.

    Args:
        state: the halves; their ways name no places.
        ways: the same ways, with the places that they are to have if these are known.
        link: the link to the host, where values are offloaded.
        times: of the operators of the graph.
    """

    def __init__(
        self, state: State, ways: tuple[Way, ...], link: Link | None, times: Times
    ) -> None:
        forward, backward = state.forward, state.backward
        assert forward is not None
        assert backward is not None
        joint = state.joint
        self._walk = walk = StepWalk(forward, backward, joint.num_fwd_outputs, joint.memories)
        self._nodes = [node for _, node in walk.running()]
        self._boundary, self._moments = walk.boundary, walk.moments
        self._ways, self._of_operators = ways, times
        self._offloaded = [way for way in ways if not way.pair]
        # A half that runs nothing has nothing to hide copies behind.
        self._has_room = len(self._nodes) == len(self._moments)
        self._transfers = self._needed(link) if self._has_room and link is not None else []

    def _needed(self, link: Link) -> list[Transfer]:
        nodes, at = self._nodes, {node: k for k, node in enumerate(self._nodes)}
        first, second = nodes[: self._boundary], nodes[self._boundary :]
        sent = {str(n.meta.get("packed_from")): n for n in first if n.target is WAIT_COPIED}
        back = {str(n.args[0]): n for n in second if n.target is RELOAD}
        return [
            Transfer(
                nbytes=way.nbytes,
                ready=at[sent[way.name]],
                needed=at[back[sent[way.name].name]],
                send=link.time_ps(way.nbytes),
                fetch=link.time_ps(way.nbytes),
            )
            for way in self._offloaded
        ]

    def placed(self, peak_bytes: int) -> tuple[tuple[Way, ...], int, int]:
        """The ways with the best places for their copies, how long runs wait then, and bytes over the peak."""
        if not self._has_room:
            return self._ways, 0, 0
        nodes, moments = self._nodes, self._moments
        alive = sums_of([x[2:] for x in self._walk.lifetimes()], len(moments))
        found = place(self._times, self._boundary, alive, self._transfers, peak_bytes)
        named: dict[str, Way] = {}
        for k, (way, transfer) in enumerate(zip(self._offloaded, self._transfers, strict=True)):
            freed, fetched = found.freed[k], found.fetched[k]
            while freed > transfer.ready and nodes[freed].target in _COPIES:
                freed -= 1
            while fetched < transfer.needed and nodes[fetched].target in _COPIES:
                fetched += 1
            named[way.name] = replace(
                way,
                freed_after=moments[freed] if freed > transfer.ready else "",
                fetched_before=moments[fetched] if fetched < transfer.needed else "",
            )
        over = max(0, max(found.bytes_alive) - peak_bytes)
        return tuple(named.get(w.name, w) for w in self._ways), found.waited, over

    def waited(self) -> int:
        """How long runs wait for copies that stand where the ways say.

        Raises:
            PlanError: a copy cannot stand there.
        """
        if not self._has_room:
            return 0
        n = len(self._moments)
        forward = {name: k for k, name in enumerate(self._moments[: self._boundary])}
        backward = dict(zip(self._moments[self._boundary :], range(self._boundary, n), strict=True))
        freed, fetched = [], []
        for way, transfer in zip(self._offloaded, self._transfers, strict=True):
            freed.append(forward.get(way.freed_after, -1) if way.freed_after else transfer.ready)
            fetched.append(
                backward.get(way.fetched_before, n) if way.fetched_before else transfer.needed
            )
            if freed[-1] < transfer.ready:
                raise PlanError(
                    f"'{way.name}' is freed after '{way.freed_after}', which does not run in forward once the "
                    "value was used there last"
                )
            if fetched[-1] > transfer.needed:
                raise PlanError(
                    f"'{way.name}' is fetched before '{way.fetched_before}', which does not run in backward "
                    "before the value is used there"
                )
        return waited_at(self._times, self._boundary, self._transfers, freed, fetched)

    @cached_property
    def _times(self) -> Sequence[int]:
        return [self._time_of(node) for node in self._nodes]

    def _time_of(self, node: fx.Node) -> int:
        """Time of a run in one of the halves."""
        if node.target in _COPIES:
            return 0
        known = self._of_operators.of_name.get(run_of(node))
        return self._of_operators.of_graph([node]) if known is None else known

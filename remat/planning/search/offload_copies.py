"""Schedule the copies of offloaded values in forward and backward, and compute the exposed transfer time."""

from __future__ import annotations

from dataclasses import replace

from remat.errors import PlanError
from remat.graph.costs.links import Link
from remat.graph.memory.host_copies import OFFLOAD, RELOAD, WAIT_COPIED
from remat.graph.memory.liveness import StepWalk
from remat.graph.problems.lowering import Offload
from remat.passes.core.state import State
from remat.planning.pipelines import for_walk
from remat.planning.search.offload_costs import Times
from remat.solvers.schedule.transfers import Transfer, exposed_time_at, place

_COPIES = (OFFLOAD, RELOAD, WAIT_COPIED)


class Copies:
    """Schedules the copies of offloaded values to and from the host in one partitioned step.

    Args:
        state: the split step. The forward graph offloads each value after the value's last use, and the backward graph
            fetches each value before its first use.
        offloads: the offloaded values. Each offload may name the places of its copies: the operator after which the
            device's memory is freed, and the operator before which the value is fetched.
        link: the link to the host.
        times: run times of the graph's operators.
    """

    def __init__(
        self, state: State, offloads: tuple[Offload, ...], link: Link, times: Times
    ) -> None:
        self._walk = walk = StepWalk(*for_walk(state))
        self._nodes = [node for _, node in walk.running()]
        self._boundary, self._program_points = walk.boundary, walk.program_points
        self._offloads = offloads
        # Copies overlap with operators, so they take no time of their own.
        self._times = [0 if n.target in _COPIES else times.of_node(n) for n in self._nodes]
        # A step without operators has no program points at which copies could be placed.
        self._has_room = len(self._nodes) == len(self._program_points)
        self._transfers = self._needed(link) if self._has_room else []

    def _needed(self, link: Link) -> list[Transfer]:
        """Return, for each offloaded value in order, the transfer of the value over a link."""
        nodes, at = self._nodes, {node: k for k, node in enumerate(self._nodes)}
        first, second = nodes[: self._boundary], nodes[self._boundary :]
        waits = {str(n.meta.get("packed_from")): n for n in first if n.target is WAIT_COPIED}
        back = {str(n.args[0]): n for n in second if n.target is RELOAD}
        return [
            Transfer(
                nbytes=value.nbytes,
                ready=at[waits[value.name]],
                needed=at[back[waits[value.name].name]],
                copy_time=link.time_ps(value.nbytes),
            )
            for value in self._offloads
        ]

    def placed(self, peak_bytes: int) -> tuple[tuple[Offload, ...], int, int]:
        """Choose when to copy offloaded values within a peak, so that operators wait for copies as little as possible.

        Args:
            peak_bytes: limit on the peak of the device's memory, in bytes.

        Returns:
            Three items: the offloads with the places of their copies; the time in ps for which operators wait for
            copies; and the bytes by which the step still exceeds the limit.
        """
        if not self._has_room:
            return self._offloads, 0, 0
        nodes, program_points = self._nodes, self._program_points
        # The walk sees copies right after the last use and right before the first one, which take the fewest bytes.
        alive = self._walk.alive()
        places = place(self._times, self._boundary, alive, self._transfers, peak_bytes)
        named = []
        for k, (value, transfer) in enumerate(zip(self._offloads, self._transfers, strict=True)):
            freed, fetched = places.freed[k], places.fetched[k]
            # Places are named by operators of the joint graph, so copies are skipped: passes have added them.
            while freed > transfer.ready and nodes[freed].target in _COPIES:
                freed -= 1
            while fetched < transfer.needed and nodes[fetched].target in _COPIES:
                fetched += 1
            named.append(
                replace(
                    value,
                    freed_after=program_points[freed] if freed > transfer.ready else "",
                    fetched_before=program_points[fetched] if fetched < transfer.needed else "",
                )
            )
        return tuple(named), places.exposed_time, max(0, max(places.bytes_alive) - peak_bytes)

    def exposed_time(self) -> int:
        """Return how long operators wait for copies, in ps, if the copies run at the nodes that the offloads name.

        Raises:
            PlanError: a value is freed before its last use in forward, or fetched after its first use in backward.
        """
        if not self._has_room:
            return 0
        n = len(self._program_points)
        forward = {name: k for k, name in enumerate(self._program_points[: self._boundary])}
        backward = dict(
            zip(self._program_points[self._boundary :], range(self._boundary, n), strict=True)
        )
        # For a name that is not in the graph, the position is -1 or n, which the checks below refuse.
        freed, fetched = [], []
        for value, transfer in zip(self._offloads, self._transfers, strict=True):
            freed.append(
                forward.get(value.freed_after, -1) if value.freed_after else transfer.ready
            )
            fetched.append(
                backward.get(value.fetched_before, n) if value.fetched_before else transfer.needed
            )
            if freed[-1] < transfer.ready:
                raise PlanError(
                    f"'{value.name}' is freed after '{value.freed_after}', which does not run in forward once the "
                    "value was used there last"
                )
            if fetched[-1] > transfer.needed:
                raise PlanError(
                    f"'{value.name}' is fetched before '{value.fetched_before}', which does not run in backward "
                    "before the value is used there"
                )
        return exposed_time_at(self._times, self._boundary, self._transfers, freed, fetched)

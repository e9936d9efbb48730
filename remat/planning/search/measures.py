"""Peaks of candidates by each measure, simulated or estimated; a peak is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from remat.errors import suppress_warnings
from remat.graph.memory.fused_liveness import FusedWalk
from remat.graph.memory.liveness import MemoryCurve, memory_curve
from remat.graph.problems.lowering import Decision
from remat.passes.core.state import State
from remat.planning.pipelines import for_walk, split
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.units import format_bytes


def curve_of(state: State) -> MemoryCurve:
    """Return the bytes alive over a step, simulated on the split graph that `split` returned."""
    return memory_curve(*for_walk(state))


class Measures:
    """Peaks of the candidates of one graph, and the modules into which each candidate splits the graph.

    Args:
        state: the prepared graph.
        on_progress: called with a line of text before each simulation.
    """

    def __init__(self, state: State, on_progress: Callable[[str], None]) -> None:
        self._state, self._on_progress = state, on_progress
        self._curves: dict[Decision, MemoryCurve] = {}
        self._estimated: dict[Decision, int] = {}
        self._splits: dict[Decision, State] = {}

    def simulated(self, candidate: Candidate) -> int:
        """Return the simulated peak of a candidate's step, in bytes."""
        return self.curve(candidate).peak_bytes

    def curve(self, candidate: Candidate) -> MemoryCurve:
        """Return the simulated bytes alive over a candidate's step."""
        key = candidate.decision
        if key not in self._curves:
            self._on_progress(f"simulating {format_bytes(candidate.saved_bytes)}")
            self._curves[key] = curve_of(self.split_of(candidate))
        return self._curves[key]

    def estimated(self, candidate: Candidate) -> int:
        """Return the estimated peak of a candidate's step after Inductor's fusion, in bytes."""
        key = candidate.decision
        if key not in self._estimated:
            self._estimated[key] = max(FusedWalk(*for_walk(self.split_of(candidate))).alive())
        return self._estimated[key]

    def split_of(self, candidate: Candidate) -> State:
        """Return the graph, split into forward and backward by a candidate's decision; recent results are cached."""
        state = self._splits.pop(candidate.decision, None)
        if state is None:
            with suppress_warnings():  # the candidate may never become a plan
                state = split(
                    replace(
                        self._state, decision=candidate.decision, provenance=candidate.provenance
                    )
                )
        # Removed above and inserted again, so that the dict is in order of last use.
        self._splits[candidate.decision] = state
        # Split graphs take memory in proportion to their nodes.
        while len(self._splits) > max(2, DEFAULT.split // len(self._state.index)):
            del self._splits[next(iter(self._splits))]
        return state

    def take_split(self, candidate: Candidate) -> State:
        """Return the graph split by a candidate's decision, uncached, so that the caller may change the graph."""
        state = self.split_of(candidate)
        del self._splits[candidate.decision]
        return state

    def adopt(self, other: Measures) -> None:
        """Copy the peaks that were computed for candidates of another, equal graph."""
        self._curves |= other._curves
        self._estimated |= other._estimated

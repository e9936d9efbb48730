"""Passes that misbehave, and pipelines of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

import remat
from remat.passes.core.base import Pass, Stage
from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline import Instrument, Pipeline
from remat.passes.core.state import Analysis, Distances, PassResult, State

sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default


def first(state: State, target: Any) -> fx.Node:
    """The first node that calls an operator."""
    return next(n for n in state.joint.graph.nodes if n.target is target)


@dataclass(frozen=True)
class Liar(Pass):
    """Changes the graph and says that it did not."""

    name: ClassVar[str] = "liar"

    def run(self, state: State) -> PassResult:
        with state.edit():
            first(state, sin).target = cos
        return PassResult(state=state, modified=False)


@dataclass(frozen=True)
class Sneak(Pass):
    """Changes the graph outside of an edit."""

    name: ClassVar[str] = "sneak"

    def run(self, state: State) -> PassResult:
        first(state, sin).meta["recompute"] = "tagged"
        return PassResult(state=state, modified=True)


@dataclass(frozen=True)
class Hoarder(Pass):
    """Preserves an analysis that its change makes wrong."""

    name: ClassVar[str] = "hoarder"

    def run(self, state: State) -> PassResult:
        state.get(Count())
        with state.edit(preserves=(Count,)) as edit:
            node = first(state, sin)
            with node.graph.inserting_after(node):
                extra = node.graph.call_function(cos, (node,))
                extra.meta = dict(node.meta)
            node.replace_all_uses_with(extra, delete_user_cb=lambda user: user is not extra)
        return edit.result()


@dataclass(frozen=True)
class Count(Analysis[int]):
    """How many nodes there are."""

    name: ClassVar[str] = "count"

    def compute(self, state: State) -> int:
        return len(state.joint.graph.nodes)


@dataclass(frozen=True)
class Wrong(Pass):
    """Computes something else, with every formality kept."""

    name: ClassVar[str] = "wrong"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            first(state, sin).target = cos
        return edit.result(swapped=1)


@dataclass(frozen=True)
class Rounds(Pass):
    """Changes numbers on purpose."""

    name: ClassVar[str] = "rounds"
    keeps_numbers: ClassVar[bool] = False

    def run(self, state: State) -> PassResult:
        return Wrong().run(state)


@dataclass(frozen=True)
class Bends(Pass):
    """Reads a product transposed where it must not be."""

    name: ClassVar[str] = "bends"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            node = next(n for n in state.joint.graph.nodes if n.name == "expand")
            node.args = (node.args[0], [8, 9])
        return edit.result()


@dataclass(frozen=True)
class Breaks(Pass):
    """Leaves a node that reads one behind it."""

    name: ClassVar[str] = "breaks"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            node = first(state, sin)
            node.append(node.all_input_nodes[0])
        return edit.result()


@dataclass(frozen=True)
class Raises(Pass):
    """Changes the graph, then raises."""

    name: ClassVar[str] = "raises"

    def run(self, state: State) -> PassResult:
        with state.edit():
            first(state, sin).target = cos
            raise KeyError("half-way")


@dataclass(frozen=True)
class Returns(Pass):
    """Returns what no pass returns."""

    name: ClassVar[str] = "returns"

    def run(self, state: State) -> PassResult:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Swaps(Pass):
    """Returns another graph and says that nothing changed."""

    name: ClassVar[str] = "swaps"

    def run(self, state: State) -> PassResult:
        return PassResult(state=replace(state, joint=state.joint.copy()), modified=False)


@dataclass(frozen=True)
class Looks(Pass):
    """Asks for an analysis that asks for others."""

    name: ClassVar[str] = "looks"
    stage: ClassVar[Stage] = Stage.ANY

    def run(self, state: State) -> PassResult:
        state.get(Distances())
        return PassResult(state=state, modified=False)


@dataclass(frozen=True)
class Twice(Fixpoint):
    """Runs its passes twice, with a statistic of its own."""

    name: ClassVar[str] = "twice"

    def run_with(self, state: State, runner: Any) -> PassResult:
        state = runner(self.passes, state).state
        result = runner(self.passes, state)
        return replace(result, statistics={"times": 2})


def run(joint: remat.JointGraph, passes: list[Pass] | str, *instruments: Instrument) -> PassResult:
    """Runs passes, or a pipeline, over a copy of a graph."""
    if isinstance(passes, str):
        return remat.PassManager.parse(passes).run(joint, instruments=instruments)
    return Pipeline(tuple(passes)).run(joint, instruments=instruments)

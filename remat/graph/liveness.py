"""Lifetimes of storages over forward, then backward, and their peak.

Eager lowering without reuse of memory in place: a value is allocated where its node stands and
freed after its last use. A workspace that the metadata of a node names counts while the node runs. Inputs, parameters,
forward outputs and gradients live to the end of the step; saved tensors and tangents end at their last use in backward, as AOTAutograd frees them.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from torch import fx

from remat.graph.copying import RUN_OF, run_of
from remat.graph.host_copies import host_storages
from remat.graph.index import inputs_of
from remat.graph.joint import (
    Role,
    is_input_mutation,
    output_node,
    outputs_of,
    role_of,
)
from remat.graph.source import module_path, source_line
from remat.graph.storages import WORKSPACE, Memories, Sizes, expression_of, hint, leaves_of

#: Key of what operators take while they run, which no value is on.
_INSIDE = 0


class StorageKind(enum.StrEnum):
    """Kind of a storage over its lifetime."""

    INPUT = "parameters and inputs"
    SAVED = "saved for backward"
    RECOMPUTED = "recomputed"
    TEMPORARY = "temporary"
    TANGENT = "tangents"
    OUTPUT = "outputs"
    GRADIENT = "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """The moment with the most bytes alive.

    Attributes:
        nbytes: bytes alive then, inputs and parameters included.
        node: the node running then.
        in_backward: whether that is in backward.
    """

    nbytes: int
    node: str
    in_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One storage from the moment it is allocated to the moment it is last used.

    Attributes:
        node: the node that made it, or the placeholder that it came in by.
        nbytes: bytes of the whole storage.
        kind: what it is to the step.
        source: where the user's code made it, ``"file.py:12 code"``; empty where that is unknown.
        first: moment at which it is there for the first time.
        last: moment at which it is there for the last time.
        saved_as: name of the value on it that forward hands to backward; empty where it hands none.
        size: ``nbytes`` as an expression of symbols; None where it depends on none.
        module: the module that made it, ``"layers.0.mlp"``; empty where that is unknown.
    """

    node: str
    nbytes: int
    kind: StorageKind
    source: str
    first: int
    last: int
    saved_as: str = ""
    size: Any = None
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory of one step: forward, then backward. A moment is the run of one node.

    Attributes:
        moments: the nodes that run, forward's first; a half that runs none counts as one moment
            with an empty name.
        boundary: number of forward's moments.
        lifetimes: every storage of the step, by the moment it begins.
    """

    moments: tuple[str, ...]
    boundary: int
    lifetimes: tuple[Lifetime, ...]

    def alive(self, moment: int) -> tuple[Lifetime, ...]:
        """Live storages while the node of a moment runs, including its result; largest first."""
        found = [x for x in self.lifetimes if x.first <= moment <= x.last]
        return tuple(sorted(found, key=lambda x: -x.nbytes))

    def nbytes(self, *kinds: StorageKind) -> tuple[int, ...]:
        """Bytes alive at each moment, of some kinds or (none given) of all."""
        chosen = (x for x in self.lifetimes if not kinds or x.kind in kinds)
        return sums_of(((x.nbytes, x.first, x.last) for x in chosen), len(self.moments))

    @property
    def peak_moment(self) -> int:
        """The first moment with the most bytes alive."""
        sums = self.nbytes()
        return sums.index(max(sums))

    @property
    def peak(self) -> PeakMoment:
        return peak_of(self.nbytes(), self.moments, self.boundary)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes alive at each moment of a step, and nothing about what they are.

    Attributes:
        nbytes: of each moment.
        boundary: number of forward's moments.
        runs: names in the joint graph of what runs at each moment; empty where they are unknown.
    """

    nbytes: Sequence[int]
    boundary: int
    runs: Sequence[str] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.nbytes)


def memory_curve(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memories: Memories | None = None,
) -> MemoryCurve:
    """Lifetimes of the storages of a step; result of `simulate_peak`."""
    step = StepWalk(forward, backward, num_fwd_outputs, memories)
    running = dict(step.running())
    runs = [run_of(running[k]) if k in running else "" for k in range(len(step.moments))]
    return MemoryCurve(nbytes=array("q", step.alive()), boundary=step.boundary, runs=runs)


def timeline(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> Timeline:
    """Lifetimes of all storages of one step over a pair of modules that carry fake values.

    Args:
        forward: returns its own outputs, then what it hands to backward.
        backward: takes what was handed over and the tangents; returns gradients.
        num_fwd_outputs: how many of forward's outputs are its own.
    """
    step = StepWalk(forward, backward, num_fwd_outputs)
    saved_as = step.sizes.first_of(step.handed)
    found = [
        Lifetime(
            node=f"workspace of {node.target}" if key == _INSIDE else node.name,
            nbytes=nbytes,
            kind=step.kind(key, first, node),
            source="" if node.op == "placeholder" else source_line(node),
            first=first,
            last=last,
            saved_as=saved_as[key].name if key in saved_as else "",
            size=expression_of(node.meta[WORKSPACE])
            if key == _INSIDE
            else step.sizes.symbolic.get(key),
            module=module_path(node),
        )
        for key, node, nbytes, first, last in step.lifetimes()
    ]
    return Timeline(
        moments=step.moments,
        boundary=step.boundary,
        lifetimes=tuple(sorted(found, key=lambda x: (x.first, x.last))),
    )


def simulate_peak(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memories: Memories | None = None,
    *,
    workspaces: bool = True,
) -> PeakMoment:
    """The peak of `timeline`, without building it.

    Args:
        forward: as for `timeline`.
        backward: as for `timeline`.
        num_fwd_outputs: as for `timeline`.
        memories: the memory behind the fake values, as far as it is known.
        workspaces: count what operators take while they run. What is left without them is the same on every machine.
    """
    return StepWalk(forward, backward, num_fwd_outputs, memories).peak(workspaces=workspaces)


def saved_storages(
    forward: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    count_outputs: bool = False,
    memories: Memories | None = None,
) -> dict[int, int]:
    """Distinct storages that forward hands to backward beyond inputs and outputs, with their bytes.

    Copies in the host's memory are left out.
    """
    values = outputs_of(forward.graph)
    sizes = Sizes(memories)
    free = sizes.of_all(forward.graph.find_nodes(op="placeholder", sort=False))
    if not count_outputs:
        own = [None] * num_fwd_outputs
        descs = leaves_of(output_node(forward.graph).meta.get("desc", own))
        free |= sizes.of_all(
            v
            for v, d in zip(values[:num_fwd_outputs], descs, strict=False)
            if isinstance(v, fx.Node) and not is_input_mutation(d)
        )
    handed = sizes.of_all(v for v in values[num_fwd_outputs:] if isinstance(v, fx.Node))
    free |= dict.fromkeys(host_storages(forward.graph.nodes, sizes), 0)
    return {k: b for k, b in handed.items() if k not in free}


def own_outputs(forward: fx.GraphModule) -> int:
    """How many of the outputs of a partitioned forward are its own, by AOTAutograd's descriptors."""
    descs = leaves_of(output_node(forward.graph).meta.get("desc", ()))
    return sum(not type(d).__name__.startswith("SavedForBackwards") for d in descs)


def sums_of(spans: Iterable[tuple[int, int, int]], moments: int) -> tuple[int, ...]:
    """Bytes alive at each moment, of storages given as (bytes, first moment, last moment)."""
    change = [0] * (moments + 1)
    for nbytes, first, last in spans:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return tuple(accumulate(change[:-1]))


def peak_of(sums: tuple[int, ...], moments: tuple[str, ...], boundary: int) -> PeakMoment:
    most = max(sums)
    moment = sums.index(most)
    return PeakMoment(nbytes=most, node=moments[moment], in_backward=moment >= boundary)


class StepWalk:
    """One walk over forward and backward. Fake storages identify the storages.

    A recomputed node has the fake value of its forward twin, so a key names one storage only within
    a half, and across both only where forward hands it over. Where a twin is alive in backward, what
    is recomputed gets a key of its own: one value of an operator with several may be kept while
    another is recomputed, and then both are made again. So does each further run within a half.

    Attributes:
        moments: the nodes that run, as in `Timeline`.
        boundary: number of forward's moments.
        sizes: tells storages apart.
        inputs: the storages that the step is given, each with the first placeholder that has it.
        outputs: bytes of the storages of forward's own outputs.
        handed: the values that forward hands to backward.
        tangents: the storages of the tangents, each with the first placeholder that has it.
        last_read: for each storage that is handed to backward, the moment of its last use there; once
            `lifetimes` has run.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_fwd_outputs: int,
        memories: Memories | None = None,
    ) -> None:
        self.sizes = sizes = Sizes(memories)
        self.last_read: dict[int, int] = {}
        first, second = list(forward.graph.nodes), list(backward.graph.nodes)
        self._forward = [n for n in first if n.op == "call_function"]
        self._backward = [n for n in second if n.op == "call_function"]
        self.boundary = max(1, len(self._forward))
        names = [n.name for n in self._forward] or [""]
        self.moments = (*names, *([n.name for n in self._backward] or [""]))
        returned, given_back = outputs_of(forward.graph), outputs_of(backward.graph)
        outputs = [v for v in returned[:num_fwd_outputs] if isinstance(v, fx.Node)]
        handed = [v for v in returned[num_fwd_outputs:] if isinstance(v, fx.Node)]
        roles = {n: role_of(n) for n in second if n.op == "placeholder"}
        self.inputs = sizes.first_of(n for n in first if n.op == "placeholder")
        self.outputs = sizes.of_all(outputs)
        self._handed = sizes.of_all(handed)
        self.handed = handed
        self.tangents = sizes.first_of(n for n, r in roles.items() if r is Role.TANGENT)
        saved = sizes.first_of((n for n, r in roles.items() if r is Role.PRIMAL))
        self._initial = {**self.tangents, **saved}
        self._returned = [v for v in given_back if isinstance(v, fx.Node)]
        self._gradients: dict[int, int] = {}
        self._twin: dict[int, int] = {}

    def running(self) -> Iterator[tuple[int, fx.Node]]:
        """The nodes that run, each with its moment."""
        yield from enumerate(self._forward)
        yield from enumerate(self._backward, self.boundary)

    @cached_property
    def again(self) -> frozenset[fx.Node]:
        """The nodes that run what an earlier node of the step ran."""
        first: dict[str, fx.Node] = {}
        return frozenset(n for _, n in self.running() if first.setdefault(run_of(n), n) is not n)

    def alive(self, *, workspaces: bool = True) -> tuple[int, ...]:
        """Bytes of the device that are alive at each moment."""
        lifetimes = self.lifetimes() if workspaces else self.storages()
        return sums_of((x[2:] for x in lifetimes), len(self.moments))

    def peak(self, *, workspaces: bool = True) -> PeakMoment:
        """The first moment with the most bytes alive."""
        return peak_of(self.alive(workspaces=workspaces), self.moments, self.boundary)

    def lifetimes(self) -> Iterator[tuple[int, fx.Node, int, int, int]]:
        """Memory of the device: its key, the node that takes it, its bytes, first and last moment.

        These are the storages, then the workspaces of operators, all under one key.
        """
        yield from self.storages()
        for taken in self.workspaces():
            yield _INSIDE, *taken

    def storages(self) -> Iterator[tuple[int, fx.Node, int, int, int]]:
        """Each storage of the device, as `lifetimes` gives it."""
        host = host_storages(self._forward, self.sizes)
        for found in self._lifetimes():
            if found[0] not in host:
                yield found

    def workspaces(self) -> Iterator[tuple[fx.Node, int, int, int]]:
        """What operators take beside what they read and return: the node, bytes, first and last moment."""
        for moment, node in self.running():
            nbytes = hint(node.meta.get(WORKSPACE, 0))
            if nbytes:
                yield node, nbytes, moment, moment

    def _lifetimes(self) -> Iterator[tuple[int, fx.Node, int, int, int]]:
        """The same with copies in the host's memory."""
        start, end = self.boundary, len(self.moments) - 1
        nbytes = self.sizes.nbytes
        inputs, outputs = self.inputs, self.outputs
        resident = {*inputs, *outputs}
        made, last = self._walk(self._backward, start, resident | self._initial.keys())
        self._gradients = self.sizes.of_all(self._returned)
        for key in self._gradients:
            last[key] = end
        self.last_read = {key: last[key] for key in self._initial if key in last}
        for key, node in inputs.items():
            yield key, node, nbytes[key], 0, end
        # Forward. What backward reads lives on; what it never reads is freed before it starts.
        mine, ends = self._walk(self._forward, 0, set())
        for key, (node, moment) in mine.items():
            if key in inputs:
                continue
            if key in outputs:
                until = end
            elif key in self._handed:
                until = last[key] if key in self._initial and key in last else start - 1
            else:
                until = ends[key]
            yield key, node, nbytes[key], moment, until
        for key, node in self._initial.items():
            if key in last and key not in resident and key not in mine:
                yield key, node, nbytes[key], start, last[key]
        resident |= self._initial.keys()
        for key, (node, moment) in made.items():
            if key not in resident:
                yield key, node, nbytes[key], moment, last[key]

    def _walk(
        self, nodes: list[fx.Node], start: int, there: set[int]
    ) -> tuple[dict[int, tuple[fx.Node, int]], dict[int, int]]:
        """For each storage of one graph: its allocating node, the moment of allocation and the last use.

        ``there`` are the storages from before that half.
        """
        made: dict[int, tuple[fx.Node, int]] = {}
        last: dict[int, int] = {}
        keys_of = self.sizes.keys
        one: dict[fx.Node, int] = {}  # nearly every node has one storage
        known = one.get
        keys = self.sizes.each([n.meta.get("val") for n in nodes])
        # Of several runs of one node in this half the last has its key, as what is handed over is that.
        again = {run_of(n) for n in nodes if RUN_OF in n.meta}
        latest = {run_of(n): n for n in nodes if run_of(n) in again}.values() if again else ()
        twice = {k for n in latest for k in keys_of(n)}
        for moment, (node, key) in enumerate(zip(nodes, keys, strict=True), start):
            for read in inputs_of(node):
                found = known(read)
                if found is not None:
                    last[found] = moment
                else:
                    for other in keys_of(read):
                        last[other] = moment
            if key is not None:
                if key in there or key in twice:
                    key = self._own(node, key, apart=key in there or node not in latest)
                one[node] = key
                last[key] = moment
                if key not in made:
                    made[key] = (node, moment)
            else:
                for other in keys_of(node):
                    own = other
                    if other in there or other in twice:
                        apart = other in there or node not in latest
                        own = self._own(node, other, apart=apart)
                    last[own] = moment
                    made.setdefault(own, (node, moment))
        return made, last

    def _own(self, node: fx.Node, key: int, *, apart: bool) -> int:
        """The storage of a node's value whose fake storage also stands for another.

        It is the one that the node looks at, if it does; else, ``apart``, one of its own.
        """
        sizes = self.sizes
        for read in inputs_of(node):
            for found in sizes.keys(read):
                if key in (found, self._twin.get(found)):
                    sizes.rename(node, key, found)
                    return found
        if not apart:
            return key
        own = -1 - len(self._twin)  # keys are addresses, so no other is negative
        self._twin[own] = key
        sizes.copy(own, key)
        sizes.rename(node, key, own)
        return own

    def kind(self, key: int, first: int, node: fx.Node) -> StorageKind:
        """What the storage with a key that begins at a moment is to the step."""
        if key in self.inputs:
            return StorageKind.INPUT
        if key in self.outputs:
            return StorageKind.OUTPUT
        if key in self.tangents:
            return StorageKind.TANGENT
        in_forward = first < self.boundary or node.op == "placeholder"
        if key in (self._handed if in_forward else self._gradients):
            return StorageKind.SAVED if in_forward else StorageKind.GRADIENT
        if key != _INSIDE and node in self.again:
            return StorageKind.RECOMPUTED
        return StorageKind.TEMPORARY

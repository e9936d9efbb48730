"""Compute the lifetimes of storages over a step, and the step's peak, which is the most bytes alive at once.

The simulated graphs run uncompiled (the eager lowering), without in-place reuse of memory. A value
is allocated when its node runs and freed after its last use. A workspace, which is memory that an
operator needs besides its inputs and results, is alive while its node runs. Inputs, parameters,
forward outputs and gradients live to the end of the step. Saved tensors and tangents live to their
last use in backward, after which AOTAutograd frees them.
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

from remat import torch_compat
from remat.graph.capture.source import module_path, source_line
from remat.graph.copying import RUN_OF, run_of
from remat.graph.index import inputs_of
from remat.graph.joint import (
    Role,
    is_input_mutation,
    output_node,
    outputs_of,
    role_of,
)
from remat.graph.memory.host_copies import host_storages
from remat.graph.memory.storages import (
    Memories,
    Sizes,
    expression_of,
    leaves_of,
    workspace_bytes,
    workspace_of,
)

#: Key that stands for the workspaces of all operators; it is the key of no storage.
_INSIDE = 0


class StorageKind(enum.StrEnum):
    """Kind of a storage by its use in a training step, such as saved for backward or temporary."""

    INPUT = "parameters and inputs"
    SAVED = "saved for backward"
    RECOMPUTED = "recomputed"
    TEMPORARY = "temporary"
    TANGENT = "tangents"
    OUTPUT = "outputs"
    GRADIENT = "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """Lifetime of one storage, from its allocation to its last use.

    Attributes:
        node: name of the node that allocated the storage, or of the placeholder that brought it in.
        nbytes: bytes of the whole storage.
        kind: kind of the storage by its use in the step.
        source: user's line that produced the node, ``"file.py:12 code"``; empty if unknown.
        first: index of the first program point (run of a node) at which the storage is alive.
        last: index of the last program point at which the storage is alive.
        saved_as: name of the value on this storage that forward saves for backward; empty if none.
        size: ``nbytes`` as a symbolic expression; None if the bytes depend on no symbol.
        module: path of the module that produced the node, ``"layers.0.mlp"``; empty if unknown.
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
    """Lifetimes of all storages of one step; a program point is the run of one node.

    Attributes:
        program_points: names of the nodes that run, forward's first. A forward or backward graph without
            calls counts as one program point with an empty name.
        boundary: number of program points in forward, which is also the index of backward's first.
        lifetimes: every storage of the step, sorted by its first program point.
    """

    program_points: tuple[str, ...]
    boundary: int
    lifetimes: tuple[Lifetime, ...]

    def alive(self, program_point: int) -> tuple[Lifetime, ...]:
        """Return the storages alive at a program point, largest first, with the result of the node that runs there."""
        storages = [x for x in self.lifetimes if x.first <= program_point <= x.last]
        return tuple(sorted(storages, key=lambda x: -x.nbytes))

    def nbytes(self, *kinds: StorageKind) -> tuple[int, ...]:
        """Return the bytes alive at each program point in storages of the given kinds, by default of all kinds."""
        chosen = (x for x in self.lifetimes if not kinds or x.kind in kinds)
        return sums_of(((x.nbytes, x.first, x.last) for x in chosen), len(self.program_points))

    @property
    def peak_point(self) -> int:
        """Index of the first program point at which the most bytes are alive."""
        sums = self.nbytes()
        return sums.index(max(sums))

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any program point, including inputs and parameters."""
        return max(self.nbytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes alive at each program point of a step, without the lifetimes of single storages.

    Attributes:
        nbytes: bytes alive at each program point.
        boundary: number of program points in forward.
        runs: joint-graph name of the node that runs at each program point; empty if unknown.
    """

    nbytes: Sequence[int]
    boundary: int
    runs: Sequence[str] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any program point."""
        return max(self.nbytes)


def memory_curve(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memories: Memories | None = None,
) -> MemoryCurve:
    """Return the bytes alive at each program point of a step, without building its `timeline`.

    Args:
        forward: module that returns the user's outputs, then the values saved for backward.
        backward: module that takes the saved values and the tangents, and returns gradients.
        num_fwd_outputs: number of forward's outputs before the saved values.
        memories: cache of the storages behind the fake values; None starts an empty cache.
    """
    step = StepWalk(forward, backward, num_fwd_outputs, memories)
    running = dict(step.running())
    runs = [run_of(running[k]) if k in running else "" for k in range(len(step.program_points))]
    return MemoryCurve(nbytes=array("q", step.alive()), boundary=step.boundary, runs=runs)


def timeline(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> Timeline:
    """Return the lifetimes of all storages of one step, computed from the fake values in forward and backward."""
    step = StepWalk(forward, backward, num_fwd_outputs)
    saved_as = step.sizes.first_of(step.saved_for_backward)
    lifetimes = [
        Lifetime(
            node=f"workspace of {node.target}" if key == _INSIDE else node.name,
            nbytes=nbytes,
            kind=step.kind(key, first, node),
            source="" if node.op == "placeholder" else source_line(node),
            first=first,
            last=last,
            saved_as=saved_as[key].name if key in saved_as else "",
            size=expression_of(workspace_of(node))
            if key == _INSIDE
            else step.sizes.symbolic.get(key),
            module=module_path(node),
        )
        for key, node, nbytes, first, last in step.lifetimes()
    ]
    return Timeline(
        program_points=step.program_points,
        boundary=step.boundary,
        lifetimes=tuple(sorted(lifetimes, key=lambda x: (x.first, x.last))),
    )


def saved_storages(
    forward: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    count_outputs: bool = False,
    memories: Memories | None = None,
) -> dict[int, int]:
    """Return the bytes of each storage that forward saves for backward, by storage key.

    The result leaves out copies in the host's memory and storages of forward's inputs.

    Args:
        forward: module that returns the user's outputs, then the values saved for backward.
        num_fwd_outputs: number of forward's outputs before the saved values.
        count_outputs: whether to count saved storages that are also storages of forward's outputs.
            Outputs that AOTAutograd writes to inputs always count.
        memories: cache of the storages behind the fake values; None starts an empty cache.
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
    saved_values = sizes.of_all(v for v in values[num_fwd_outputs:] if isinstance(v, fx.Node))
    free |= dict.fromkeys(host_storages(forward.graph.nodes, sizes), 0)
    return {k: b for k, b in saved_values.items() if k not in free}


def own_outputs(forward: fx.GraphModule) -> int:
    """Return the number of forward's outputs for the user, without the values saved for backward."""
    descs = leaves_of(output_node(forward.graph).meta.get("desc", ()))
    # AOTAutograd's descriptors mark the saved values.
    return sum(not type(d).__name__.startswith("SavedForBackwards") for d in descs)


def sums_of(spans: Iterable[tuple[int, int, int]], program_points: int) -> tuple[int, ...]:
    """Return the bytes alive at each program point, for storages given as (bytes, first, last program point)."""
    change = [0] * (program_points + 1)
    for nbytes, first, last in spans:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return tuple(accumulate(change[:-1]))


class StepWalk:
    """Simulation of the memory that forward and backward of a step take.

    A storage is identified by a key: the `storage_key` of a fake value on the storage. A recomputed node has the fake
    value of its forward run. Therefore one key may stand for two storages, one that a node's forward run allocates
    and one that its recomputation allocates. A key names the same storage in forward and in backward only if forward
    saves the storage. A second run of an operator computes all its results, even saved results, which are still alive
    from the first run. The second storage of a saved result then has a key of its own. If a node runs several times
    within forward or within backward, each run's storages have keys of their own.

    Attributes:
        program_points: names of the nodes that run, forward's first.
        boundary: number of program points in forward.
        sizes: keys and bytes of the storages.
        inputs: by key of each storage that the step receives, the first placeholder that uses it.
        outputs: bytes of each storage of the user's outputs, by storage key.
        saved_for_backward: nodes of forward whose values are saved for backward.
        tangents: by key of each storage of a tangent, the first placeholder that uses it.
        last_read: by key of each storage passed to backward, the program point of its last use in backward.
            Empty until `lifetimes` or `storages` has run to its end.
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
        # An empty graph still has one program point, at which its inputs are alive.
        self.boundary = max(1, len(self._forward))
        names = [n.name for n in self._forward] or [""]
        self.program_points = (*names, *([n.name for n in self._backward] or [""]))
        returned, given_back = outputs_of(forward.graph), outputs_of(backward.graph)
        outputs = [v for v in returned[:num_fwd_outputs] if isinstance(v, fx.Node)]
        saved_values = [v for v in returned[num_fwd_outputs:] if isinstance(v, fx.Node)]
        roles = {n: role_of(n) for n in second if n.op == "placeholder"}
        self.inputs = sizes.first_of(n for n in first if n.op == "placeholder")
        self.outputs = sizes.of_all(outputs)
        self._saved_storages = sizes.of_all(saved_values)
        self.saved_for_backward = saved_values
        self.tangents = sizes.first_of(n for n, r in roles.items() if r is Role.TANGENT)
        saved = sizes.first_of((n for n, r in roles.items() if r is Role.PRIMAL))
        self._initial = {**self.tangents, **saved}
        self._returned = [v for v in given_back if isinstance(v, fx.Node)]
        self._gradients: dict[int, int] = {}
        self._twin: dict[int, int] = {}

    def running(self) -> Iterator[tuple[int, fx.Node]]:
        """Yield (index of the program point, node that runs at it) for each call node of the step."""
        yield from enumerate(self._forward)
        yield from enumerate(self._backward, self.boundary)

    @cached_property
    def again(self) -> frozenset[fx.Node]:
        """Nodes that are a second or later run of a joint-graph node within the step."""
        first: dict[str, fx.Node] = {}
        return frozenset(n for _, n in self.running() if first.setdefault(run_of(n), n) is not n)

    def alive(self, *, workspaces: bool = True) -> tuple[int, ...]:
        """Return the bytes of device memory alive at each program point.

        Args:
            workspaces: whether to count the workspaces of operators. Without workspaces, the bytes are
                the same on every machine.
        """
        lifetimes = self.lifetimes() if workspaces else self.storages()
        return sums_of((x[2:] for x in lifetimes), len(self.program_points))

    def lifetimes(self) -> Iterator[tuple[int, fx.Node, int, int, int]]:
        """Yield each storage in device memory, followed by each workspace (memory inside of an operator).

        Each item is (storage key, allocating node, bytes, first program point, last program point). Workspaces
        are no storages, so all of them have one and the same key.
        """
        yield from self.storages()
        for workspace in self.workspaces():
            yield _INSIDE, *workspace

    def workspaces(self) -> Iterator[tuple[fx.Node, int, int, int]]:
        """Yield (node, bytes, first program point, last program point) for each node with a workspace."""
        for program_point, node in self.running():
            if nbytes := workspace_bytes(node):
                yield node, nbytes, program_point, program_point

    def storages(self) -> Iterator[tuple[int, fx.Node, int, int, int]]:
        """Yield each storage in device memory, without workspaces, as a tuple like those of `lifetimes`."""
        start, end = self.boundary, len(self.program_points) - 1
        nbytes = self.sizes.nbytes
        inputs, outputs = self.inputs, self.outputs
        resident = {*inputs, *outputs}
        # Backward goes first, because the last use of a saved storage ends its lifetime.
        from_backward, last = self._walk(self._backward, start, resident | self._initial.keys())
        self._gradients = self.sizes.of_all(self._returned)
        held = self.tangents if torch_compat.holds_tangents() else {}
        for key in (*self._gradients, *held):
            last[key] = end
        self.last_read = {key: last[key] for key in self._initial if key in last}
        for key, node in inputs.items():
            yield key, node, nbytes[key], 0, end
        # A saved storage that is no output lives to its last read in backward. If backward never reads it, it is
        # freed at the start of backward.
        from_forward, ends = self._walk(self._forward, 0, set())
        # Offloaded copies take no device memory.
        elsewhere = {*inputs, *host_storages(self._forward, self.sizes)}
        for key, (node, program_point) in from_forward.items():
            if key in elsewhere:
                continue
            if key in outputs:
                until = end
            elif key in self._saved_storages:
                until = self.last_read.get(key, start - 1)
            else:
                until = ends[key]
            yield key, node, nbytes[key], program_point, until
        for key, until in self.last_read.items():
            if key not in resident and key not in from_forward:
                yield key, self._initial[key], nbytes[key], start, until
        resident |= self._initial.keys()
        for key, (node, program_point) in from_backward.items():
            if key not in resident:
                yield key, node, nbytes[key], program_point, last[key]

    def _walk(
        self, nodes: list[fx.Node], start: int, existing: set[int]
    ) -> tuple[dict[int, tuple[fx.Node, int]], dict[int, int]]:
        """Return two dicts by storage key: one of pairs (allocating node, its program point), one of last uses."""
        allocations: dict[int, tuple[fx.Node, int]] = {}
        last: dict[int, int] = {}
        keys_of = self.sizes.keys
        only_key: dict[fx.Node, int] = {}  # nearly every node has one storage
        key_of = only_key.get
        keys = self.sizes.each([n.meta.get("val") for n in nodes])
        # If a node runs several times in this graph, its last run keeps the key, because this run's result is saved.
        again = {run_of(n) for n in nodes if RUN_OF in n.meta}
        latest = {run_of(n): n for n in nodes if run_of(n) in again}.values() if again else ()
        twice = {k for n in latest for k in keys_of(n)}
        for program_point, (node, key) in enumerate(zip(nodes, keys, strict=True), start):
            for read in inputs_of(node):
                read_key = key_of(read)
                if read_key is not None:
                    last[read_key] = program_point
                else:
                    for other in keys_of(read):
                        last[other] = program_point
            for own in keys_of(node) if key is None else (key,):
                if own in existing or own in twice:
                    own = self._key_for(node, own, apart=own in existing or node not in latest)
                if key is not None:
                    only_key[node] = own
                last[own] = program_point
                if own not in allocations:
                    allocations[own] = (node, program_point)
        return allocations, last

    def _key_for(self, node: fx.Node, key: int, *, apart: bool) -> int:
        """Return the base's key if a node is a view; otherwise return ``key``, or a new key if ``apart`` is set."""
        sizes = self.sizes
        # If the base of a view runs several times, the view shares memory with the run that it reads. This need not
        # be the latest run.
        for read in inputs_of(node):
            for other in sizes.keys(read):
                if key in (other, self._twin.get(other)):
                    sizes.rename(node, key, other)
                    return other
        if not apart:
            return key
        own = -1 - len(self._twin)  # keys of real storages are addresses, which are never negative
        self._twin[own] = key
        sizes.rename(node, key, own)
        return own

    def kind(self, key: int, first: int, node: fx.Node) -> StorageKind:
        """Return the kind of a storage from its key, its first program point and the node that allocates it."""
        if key in self.inputs:
            return StorageKind.INPUT
        if key in self.outputs:
            return StorageKind.OUTPUT
        if key in self.tangents:
            return StorageKind.TANGENT
        # A placeholder of backward that is not a tangent holds a value that forward saved.
        in_forward = first < self.boundary or node.op == "placeholder"
        if key in (self._saved_storages if in_forward else self._gradients):
            return StorageKind.SAVED if in_forward else StorageKind.GRADIENT
        if key != _INSIDE and node in self.again:
            return StorageKind.RECOMPUTED
        return StorageKind.TEMPORARY

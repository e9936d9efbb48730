"""When each storage of a step begins and ends, by one walk over forward and one over backward."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from torch import fx

from remat.graph.index import inputs_of
from remat.graph.joint import Role, outputs_of, role_of
from remat.graph.memories import Memories
from remat.graph.sizes import Sizes


class Kind(enum.StrEnum):
    """What a storage is to the step, over its whole life."""

    INPUT = "parameters and inputs"
    SAVED = "saved for backward"
    TEMPORARY = "temporary"
    TANGENT = "tangents"
    OUTPUT = "outputs"
    GRADIENT = "gradients"


class Step:
    """One walk over both halves. Storages are told apart by the identity of the fake ones.

    A recomputed node has the fake value of its forward twin, so a key names one storage only within
    a half, and across both only where forward hands it over. Where a twin is alive in backward, what
    is recomputed gets a key of its own: one value of an operator with several may be kept while
    another is recomputed, and then both are made again.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_fwd_outputs: int,
        memories: Memories | None = None,
    ) -> None:
        self._sizes = sizes = Sizes(memories)
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
        self._inputs = sizes.first_of(n for n in first if n.op == "placeholder")
        self._outputs = sizes.of_all(outputs)
        self._handed = sizes.of_all(handed)
        self._tangents = sizes.first_of(n for n, r in roles.items() if r is Role.TANGENT)
        saved = sizes.first_of((n for n, r in roles.items() if r is Role.PRIMAL))
        self._initial = {**self._tangents, **saved}
        self._returned = [v for v in given_back if isinstance(v, fx.Node)]
        self._gradients: dict[int, int] = {}
        self._twin: dict[int, int] = {}

    def lifetimes(self) -> Iterator[tuple[int, fx.Node, int, int, int]]:
        """Each storage: its key, the node that made it, its bytes, first and last moment."""
        start, end = self.boundary, len(self.moments) - 1
        nbytes = self._sizes.nbytes
        inputs, outputs = self._inputs, self._outputs
        resident = {*inputs, *outputs}
        made, last = self._walk(self._backward, start, resident | self._initial.keys())
        self._gradients = self._sizes.of_all(self._returned)
        for key in self._gradients:
            last[key] = end
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
        """For each storage of one half: who makes it and when, and when it is used last.

        ``there`` are the storages from before that half.
        """
        made: dict[int, tuple[fx.Node, int]] = {}
        last: dict[int, int] = {}
        keys_of = self._sizes.keys
        one: dict[fx.Node, int] = {}  # nearly every node has one storage
        known = one.get
        keys = self._sizes.each([n.meta.get("val") for n in nodes])
        for moment, (node, key) in enumerate(zip(nodes, keys, strict=True), start):
            for read in inputs_of(node):
                found = known(read)
                if found is not None:
                    last[found] = moment
                else:
                    for other in keys_of(read):
                        last[other] = moment
            if key is not None:
                if key in there:
                    key = self._own(node, key)
                one[node] = key
                last[key] = moment
                if key not in made:
                    made[key] = (node, moment)
            else:
                for other in keys_of(node):
                    own = self._own(node, other) if other in there else other
                    last[own] = moment
                    made.setdefault(own, (node, moment))
        return made, last

    def _own(self, node: fx.Node, key: int) -> int:
        """The storage of a node's value whose fake storage also stands for one from before."""
        sizes = self._sizes
        for read in inputs_of(node):
            for found in sizes.keys(read):
                if key in (found, self._twin.get(found)):
                    sizes.rename(node, key, found)
                    return found
        own = -1 - len(self._twin)  # keys are addresses, so no other is negative
        self._twin[own] = key
        sizes.nbytes[own] = sizes.nbytes[key]
        sizes.rename(node, key, own)
        return own

    def kind(self, key: int, first: int, node: fx.Node) -> Kind:
        """What the storage with a key that begins at a moment is to the step."""
        if key in self._inputs:
            return Kind.INPUT
        if key in self._outputs:
            return Kind.OUTPUT
        if key in self._tangents:
            return Kind.TANGENT
        if first < self.boundary or node.op == "placeholder":
            return Kind.SAVED if key in self._handed else Kind.TEMPORARY
        return Kind.GRADIENT if key in self._gradients else Kind.TEMPORARY

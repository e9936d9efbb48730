"""What is alive when, while forward and then backward run: lifetimes of storages, and their peak.

Eager lowering without reuse of memory in place: a value is allocated where its node stands and
freed after its last use. Inputs, parameters, forward outputs and gradients live to the end of the
step; saved tensors and tangents end at their last use in backward, as AOTAutograd frees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from remat.graph.joint import leaves_of, output_node, outputs_of
from remat.graph.lifetimes import Kind, Step
from remat.graph.memories import Memories
from remat.graph.sizes import Sizes
from remat.graph.source import source_line
from remat.graph.storages import is_input_mutation
from remat.torch_compat import pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
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
    """

    node: str
    nbytes: int
    kind: Kind
    source: str
    first: int
    last: int


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
        """What is alive while the node of a moment runs, its result included; largest first."""
        found = [x for x in self.lifetimes if x.first <= moment <= x.last]
        return tuple(sorted(found, key=lambda x: -x.nbytes))

    def nbytes(self, *kinds: Kind) -> tuple[int, ...]:
        """Bytes alive at each moment, of some kinds or (none given) of all."""
        chosen = (x for x in self.lifetimes if not kinds or x.kind in kinds)
        return _sums(((x.nbytes, x.first, x.last) for x in chosen), len(self.moments))

    @property
    def peak_moment(self) -> int:
        """The first moment with the most bytes alive."""
        sums = self.nbytes()
        return sums.index(max(sums))

    @property
    def peak(self) -> Peak:
        return _peak(self.nbytes(), self.moments, self.boundary)


def timeline(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> Timeline:
    """Lifetimes of all storages of one step over a pair of modules that carry fake values.

    Args:
        forward: returns its own outputs, then what it hands to backward.
        backward: takes what was handed over and the tangents; returns gradients.
        num_fwd_outputs: how many of forward's outputs are its own.
    """
    step = Step(forward, backward, num_fwd_outputs)
    found = [
        Lifetime(
            node=node.name,
            nbytes=nbytes,
            kind=step.kind(key, first, node),
            source="" if node.op == "placeholder" else source_line(node),
            first=first,
            last=last,
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
) -> Peak:
    """The peak of `timeline`, without building it: for searches over many plans.

    Args:
        forward: as for `timeline`.
        backward: as for `timeline`.
        num_fwd_outputs: as for `timeline`.
        memories: the memory behind the fake values, as far as it is known.
    """
    step = Step(forward, backward, num_fwd_outputs, memories)
    change = [0] * (len(step.moments) + 1)
    for _, _, nbytes, first, last in step.lifetimes():
        change[first] += nbytes
        change[last + 1] -= nbytes
    return _peak(tuple(accumulate(change[:-1])), step.moments, step.boundary)


def saved_storages(
    forward: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    count_outputs: bool = False,
    memories: Memories | None = None,
) -> dict[int, int]:
    """Distinct storages that forward hands to backward beyond inputs and outputs, with their bytes."""
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
    return {k: b for k, b in handed.items() if k not in free}


def own_outputs(forward: fx.GraphModule) -> int:
    """How many of the outputs of a partitioned forward are its own, by AOTAutograd's descriptors."""
    descs = pytree.arg_tree_leaves(output_node(forward.graph).meta.get("desc", ()))
    return sum(not type(d).__name__.startswith("SavedForBackwards") for d in descs)


def _sums(spans: Iterable[tuple[int, int, int]], moments: int) -> tuple[int, ...]:
    """Bytes alive at each moment, of storages given as (bytes, first moment, last moment)."""
    change = [0] * (moments + 1)
    for nbytes, first, last in spans:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return tuple(accumulate(change[:-1]))


def _peak(sums: tuple[int, ...], moments: tuple[str, ...], boundary: int) -> Peak:
    most = max(sums)
    moment = sums.index(most)
    return Peak(nbytes=most, node=moments[moment], in_backward=moment >= boundary)

"""Bytes that the graphs of one step hold together, counted as they run, where a budget bounds its peak in bytes.

A plan knows what its own graph takes. How often a graph runs in a step, and what else is alive then, shows as
graphs run: several forwards come before the first backward. Counted are the inputs of all graphs that ran in the step,
what they handed to backward, outputs that are still alive, gradients of parameters, and what the running graph makes.
What runs between the graphs is not known here, nor what saved-tensor hooks pack.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetWarning, RematError, warn
from remat.graph.joint import primal_place
from remat.graph.liveness import StorageKind, Timeline
from remat.graph.storages import expression_of, hint
from remat.integrations.step_guards import SizedBytes
from remat.planning.plan import Plan
from remat.units import format_apart

#: A step that was warned of is warned of again if it takes more by this part, as one over it.
_MORE = 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class GraphMemory:
    """What one compiled graph takes by itself, inputs aside.

    Attributes:
        name: the graph, for people.
        forward_bytes: most bytes alive in forward.
        backward_bytes: most bytes alive in backward, forward's outputs aside.
        held_bytes: bytes from forward to backward, beyond inputs and outputs.
        read: places of the inputs that backward reads.
        reread_outputs: places of the outputs that backward reads.
        own: parameters and buffers that are no inputs.
        parameters: places of the inputs that are parameters.
        values: places of the other tensors among them.
        sizes: places of the inputs that are sizes, each with its symbol and the number that was planned for.
        bytes_at: peak of the graph by itself at other sizes; None if its bytes depend on none.
        fixed_bytes: bytes of that peak that depend on no size: parameters.
    """

    name: str
    forward_bytes: int
    backward_bytes: int
    held_bytes: int
    read: frozenset[int]
    reread_outputs: tuple[int, ...]
    own: tuple[torch.Tensor, ...] = ()
    parameters: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    sizes: tuple[tuple[int, str, int], ...] = ()
    bytes_at: SizedBytes | None = None
    fixed_bytes: int = 0
    _factors: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, made: Plan, gm: fx.GraphModule, inputs: Sequence[Any]) -> GraphMemory:
        """The memory of a graph that was compiled by a plan.

        Args:
            made: the plan, with the figures of the code that runs.
            gm: the graph as Dynamo handed it over.
            inputs: what it was compiled with.
        """
        own = (
            *(p for _, p in gm.named_parameters(remove_duplicate=False)),
            *(b for _, b in gm.named_buffers(remove_duplicate=False)),
        )
        places = (primal_place(name) for name in made.saved)
        forward, backward = _highest(made)
        tensors = [k for k, v in enumerate(inputs) if isinstance(v, torch.Tensor)]
        parameters = [k for k in tensors if isinstance(inputs[k], torch.nn.Parameter)]
        return cls(
            name=made.graph,
            forward_bytes=forward,
            backward_bytes=backward,
            held_bytes=made.saved_bytes,
            read=frozenset(k - len(own) for k in places if k is not None and k >= len(own)),
            reread_outputs=made.reread_outputs,
            own=own,
            parameters=tuple(parameters),
            values=tuple(k for k in tensors if k not in parameters),
            sizes=tuple(
                (k, str(expression_of(v)), hint(v))
                for k, v in enumerate(inputs)
                if isinstance(v, torch.SymInt)
            ),
            bytes_at=SizedBytes(made) if made.symbolic else None,
            fixed_bytes=sum(dict(map(_storage, (*own, *(inputs[k] for k in parameters)))).values()),
        )

    def scaled(self, arguments: Sequence[Any]) -> float:
        """Ratio of actual to planned bytes; it differs from 1 if the sizes do."""
        seen = tuple(arguments[k] for k, *_ in self.sizes)
        if self.bytes_at is None or all(
            number <= planned for number, (*_, planned) in zip(seen, self.sizes, strict=True)
        ):
            return 1.0
        if seen not in self._factors:
            names = (name for _, name, _ in self.sizes)
            ranges = {name: (k, k) for name, k in zip(names, seen, strict=True)}
            taken = self.bytes_at.taken - self.fixed_bytes
            more = self.bytes_at(ranges) - self.bytes_at.taken
            self._factors[seen] = 1 + max(0, more) / max(1, taken)
        return self._factors[seen]


def _highest(made: Plan) -> tuple[int, int]:
    """Most bytes alive in forward beside inputs, and in backward beside inputs and outputs."""
    try:
        timeline: Timeline = made.timeline
    except RematError:  # a plan out of a cache, whose memory as compiled is not known
        return made.peak_bytes, made.peak_bytes
    kinds = [k for k in StorageKind if k is not StorageKind.INPUT]
    forward = max(timeline.nbytes(*kinds)[: timeline.boundary], default=0)
    kinds.remove(StorageKind.OUTPUT)
    return forward, max(timeline.nbytes(*kinds)[timeline.boundary :], default=0)


class _Parameters:
    """The parameters of one run, the same in every step.

    Attributes:
        sizes: bytes by storage.
        gradients: likewise, of those that get one.
        fleeting_bytes: bytes that are there while the graph runs only, as under FSDP: then shards are counted above.
    """

    __slots__ = ("fleeting_bytes", "gradients", "refs", "sizes")

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.sizes = dict(map(_storage, given))
        self.gradients = dict(_storage(value) for value in given if value.requires_grad)
        self.fleeting_bytes = 0
        self.refs = [weakref.ref(value) for value in given]

    @property
    def freed(self) -> bool:
        """Whether they are there, and their memory is not."""
        found = [value for ref in self.refs if (value := ref()) is not None]
        return any(not value.untyped_storage().nbytes() for value in found)

    def shard(self) -> None:
        """Counts one rank's shards from now on."""
        distributed = torch.distributed
        there = distributed.is_available() and distributed.is_initialized()
        ranks = distributed.get_world_size() if there else 1
        self.fleeting_bytes = sum(self.sizes.values())
        self.gradients = {key: -(-nbytes // ranks) for key, nbytes in self.gradients.items()}
        # A shard lies elsewhere than the parameter.
        self.sizes = {-key: -(-nbytes // ranks) for key, nbytes in self.sizes.items()}


class _Run:
    """One run of a graph, between its forward and its backward."""

    __slots__ = ("__weakref__", "backward_bytes", "held", "keys", "name", "parameters", "tally")

    def __init__(
        self, tally: StepTally, graph: GraphMemory, factor: float, parameters: _Parameters
    ) -> None:
        self.tally, self.name, self.parameters = tally, graph.name, parameters
        self.held = int(graph.held_bytes * factor)
        self.backward_bytes = int(graph.backward_bytes * factor)
        self.keys: list[int] | None = None  # storages that it holds; None: it holds nothing

    def begin_backward(self, _: Any) -> None:
        self.tally.backward(self)

    def __del__(self) -> None:
        self.tally.release(self)


class StepTally:
    """Counts what the graphs of a step take together, and warns where that is above their budget.

    A step begins when a graph runs while no other waits for its backward.

    Args:
        limit: the budget on the peak, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()  # a run may be collected at any moment
        self._compiled: weakref.WeakKeyDictionary[GraphMemory, int] = weakref.WeakKeyDictionary()
        self._warned: weakref.WeakKeyDictionary[GraphMemory, int] = weakref.WeakKeyDictionary()
        self._values: dict[int, list[int]] = {}  # by storage: its bytes, and how many hold it
        self._bytes = 0  # of those storages, of gradients, and what runs hold beside them
        self._held = 0  # what runs hold beside inputs and outputs
        self._waiting = 0  # runs that wait for their backward
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._parameters: dict[tuple[int, ...], _Parameters] = {}
        self._gradients: dict[int, int] = {}  # of parameters: their bytes
        self._begin()

    def _begin(self) -> None:
        """Begin a step."""
        self._alive()
        self._bytes -= sum(self._gradients.values())
        self._gradients = {}
        self._ran: set[tuple[int, ...]] = set()  # graphs with their parameters
        self._graphs: weakref.WeakSet[GraphMemory] = weakref.WeakSet()
        self._runs = self._peak = 0
        self._each = 0  # what each run may hold for the step to stay within its budget

    @property
    def runs(self) -> int:
        """Runs whose backward is pending, and compiled graphs that have not run yet."""
        return self._waiting + len(self._compiled)

    def beside(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Bytes that the other graphs of the step hold while a graph runs that is about to be compiled.

        Args:
            gm: the graph.
            inputs: what it is compiled with.
        """
        with self._lock:
            if not self._waiting:
                self._begin()
            self._forget_others()
            tensors = (*gm.parameters(), *gm.buffers(), *inputs)
            own = {_storage(v)[0] for v in tensors if isinstance(v, torch.Tensor)}
            shared = sum(self._values[key][0] for key in own if key in self._values)
            return self._bytes - shared + self._alive(own) + sum(self._compiled.values())

    def add(self, graph: GraphMemory, inputs: Sequence[Any]) -> None:
        """Counts a graph that was compiled and has not run yet."""
        places = {*graph.parameters, *graph.read}.intersection(range(len(inputs)))
        given = [inputs[k] for k in places if isinstance(inputs[k], torch.Tensor)]
        there = dict(map(_storage, (*graph.own, *given)))
        with self._lock:
            new = sum(nbytes for key, nbytes in there.items() if key not in self._values)
            self._compiled[graph] = graph.held_bytes + new

    def forward(
        self, graph: GraphMemory, arguments: Sequence[Any], outputs: Sequence[Any], step: Any
    ) -> None:
        """Counts a run of forward; ``step`` is the node of autograd's graph that will run backward."""
        # DDP's splitting of graphs runs each on fake tensors as well.
        if any(isinstance(value, torch_compat.FakeTensor) for value in outputs):
            return
        if torch_compat.saved_tensor_hooks(False) is not None:  # which may keep something else
            return
        with self._lock:
            if not self._waiting:
                self._begin()
            self._compiled.pop(graph, None)
            self._runs += 1
            self._graphs.add(graph)
            factor = graph.scaled(arguments)
            parameters = self._parameters_of(graph, arguments)
            run = _Run(self, graph, factor, parameters)
            keys: list[int] = []
            passing: list[int] = []  # storages that only forward reads
            for k in graph.values:
                value = arguments[k]
                # An input without a history is the user's, who keeps it.
                kept = k in graph.read or value.grad_fn is None
                self._hold(*_storage(value), keys if kept else passing)
            if self._waiting:
                taken = int(graph.forward_bytes * factor) + parameters.fleeting_bytes
                self._note(taken, run, self._held, self._waiting)
            for key in passing:
                self._drop(key)
            self._waiting += 1
            self._held += run.held
            self._bytes += run.held
            for k, value in enumerate(outputs):
                if isinstance(value, torch.Tensor):
                    key, nbytes = _storage(value)
                    if k in graph.reread_outputs:
                        self._hold(key, nbytes, keys)
                    self._outputs[key] = (weakref.ref(value), nbytes)
            run.keys = keys
        step.register_prehook(run.begin_backward)

    def _parameters_of(self, graph: GraphMemory, arguments: Sequence[Any]) -> _Parameters:
        """Counts the parameters of a run, those of earlier runs aside."""
        given = [arguments[k] for k in graph.parameters]
        key = (id(graph), *map(id, given))
        self._ran.add(key)
        found = self._parameters.get(key)
        if found is None:
            found = _Parameters((*graph.own, *given))
            self._count(key, found)
        return found

    def _count(self, key: tuple[int, ...], parameters: _Parameters) -> None:
        self._parameters[key] = parameters
        for storage, nbytes in parameters.sizes.items():
            self._hold(storage, nbytes)

    def _forget(self, key: tuple[int, ...]) -> None:
        parameters = self._parameters.pop(key)
        for storage in parameters.sizes:
            self._drop(storage)
        for storage in parameters.gradients:
            self._bytes -= self._gradients.pop(storage, 0)

    def backward(self, run: _Run) -> None:
        """Counts a run of backward, which is about to begin."""
        with self._lock:
            if run.keys is None:  # backward runs once more, of what was kept for that
                return
            if self._runs > 1:
                others = self._waiting - 1
                # FSDP gathers the parameters of the next backward meanwhile, into a buffer that it copies.
                gathered = run.parameters.fleeting_bytes * (3 if others else 1)
                taken = run.backward_bytes + gathered - run.held
                self._note(taken, run, self._held - run.held, others)
            for key, nbytes in run.parameters.gradients.items():
                if key not in self._gradients:
                    self._gradients[key] = nbytes
                    self._bytes += nbytes
            if not torch_compat.keeps_graph():
                self.release(run)
            if not self._waiting:
                self._warn(run, done=True)

    def release(self, run: _Run) -> None:
        """Release the saved bytes of a run whose backward has begun or will never run."""
        with self._lock:
            keys, run.keys = run.keys, None
            if keys is None:
                return
            self._waiting -= 1
            self._held -= run.held
            self._bytes -= run.held
            for key in keys:
                self._drop(key)

    def _hold(self, key: int, nbytes: int, keys: list[int] | None = None) -> None:
        if keys is not None:
            keys.append(key)
        found = self._values.get(key)
        if found is None:
            self._values[key] = [nbytes, 1]
            self._bytes += nbytes
        else:
            found[1] += 1

    def _drop(self, key: int) -> None:
        found = self._values[key]
        found[1] -= 1
        if not found[1]:
            self._bytes -= found[0]
            del self._values[key]

    def _alive(self, own: set[int] | None = None) -> int:
        """Bytes of live outputs, except outputs counted already or among the given storages."""
        found = 0
        for key, (value, nbytes) in list(self._outputs.items()):
            if value() is None:
                del self._outputs[key]
            elif key not in self._values and (own is None or key not in own):
                found += nbytes
        return found

    def _note(self, running: int, run: _Run, held: int, others: int) -> None:
        """Notes what is alive while a graph runs that makes so many bytes, and others hold so many for backward."""
        taken = self._bytes + self._alive() + running
        if taken > self.limit:
            before = self._bytes
            self._forget_others()
            taken -= before - self._bytes
        if taken <= self._peak:
            return
        self._peak = taken
        if taken > self.limit:
            self._each = (self.limit - (taken - held)) // others if others else 0
            self._warn(run, done=False)

    def _forget_others(self) -> None:
        """Counts parameters no more that this step has not read, and shards of those that were freed after their graph ran."""
        freed = {key[0] for key, found in self._parameters.items() if found.freed}
        for key, parameters in list(self._parameters.items()):
            if key not in self._ran:
                self._forget(key)
            elif not parameters.fleeting_bytes and key[0] in freed:
                self._forget(key)
                parameters.shard()
                self._count(key, parameters)

    def _warn(self, run: _Run, *, done: bool) -> None:
        """Warn of a step above its budget: at once, and again at its end if it grew far above."""
        warned = max((self._warned.get(graph, 0) for graph in self._graphs), default=0)
        if (warned and not done) or self._peak <= max(self.limit, warned + warned // _MORE):
            return
        for graph in self._graphs:
            self._warned[graph] = self._peak
        taken, limit = format_apart(self._peak, self.limit)
        so_far, saved = ("", "") if done else (" so far", "")
        if done and self._each > 0:
            saved = f", or give each graph about remat.Saved({self._each})"
        warn(
            f"a step takes {taken} ({self._peak} bytes){so_far}, in {self._runs} runs of compiled graphs, '{run.name}' "
            f"the last of them, above the {limit} ({self.limit} bytes) of the budget on its peak. Graphs that are "
            "compiled one by one are planned within what those before them hold, each as if it ran once in a step. "
            "Compile the model as one graph, or plan its graphs together: remat.plan(remat.capture(model, args, "
            f'fullgraph=False), budget=…), then options={{"plan": plans}}{saved}',
            BudgetWarning,
            stacklevel=4,
        )


def _storage(value: torch.Tensor) -> tuple[int, int]:
    """Id and bytes of the storage of a tensor; (0, 0) for a tensor without a storage of its own."""
    try:
        storage = value.untyped_storage()
        return torch_compat.storage_id(storage), hint(storage.nbytes())
    except (NotImplementedError, RuntimeError):
        return 0, 0


_LOCK = threading.Lock()
_TALLIES: dict[int, StepTally] = {}


def tally_of(limit: int) -> StepTally:
    """Who counts the graphs that are compiled under a budget on the peak, in bytes.

    All graphs under the same budget are of one step if they run in one: what is alive is alive, whoever compiled it.
    """
    with _LOCK:
        return _TALLIES.setdefault(limit, StepTally(limit))

"""Add up the bytes that all graphs of one step have alive, under a budget on the peak in bytes.

A plan states the memory of a single graph. How often a graph runs in a step, and which other memory is alive during a
run, is known only at run time. Several forward graphs may run before the first backward. The tally includes inputs of
all graphs that ran in the step, saved values, live outputs, gradients of parameters, and allocations of the running
graph. The tally includes neither memory of operators between the graphs nor memory of saved-tensor hooks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import BudgetWarning, LastWarning, warn
from remat.integrations.graph_memory import GraphMemory, storage_of
from remat.integrations.step_together import Key, StepTogether
from remat.units import format_bytes


class _Parameters:
    """Bytes of the parameters and buffers that a graph reads in one run, and of the parameters' gradients."""

    __slots__ = ("fleeting_bytes", "gradients", "refs", "sizes")

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        # Both dicts are keyed by storage ids. After `shard`, they have the bytes of one rank's shards.
        self.sizes = dict(map(storage_of, given))
        self.gradients = dict(storage_of(value) for value in given if value.requires_grad)
        # Bytes of parameters that are allocated only while the graph runs, as under FSDP.
        self.fleeting_bytes = 0
        self.refs = [weakref.ref(value) for value in given]

    @property
    def freed(self) -> bool:
        """Whether FSDP has freed the memory of a parameter that still exists, as FSDP does after each use."""
        values = [value for ref in self.refs if (value := ref()) is not None]
        return any(not value.untyped_storage().nbytes() for value in values)

    def shard(self) -> None:
        """Replace the bytes of whole parameters and gradients by those of one rank's shards."""
        distributed = torch.distributed
        has_ranks = distributed.is_available() and distributed.is_initialized()
        ranks = distributed.get_world_size() if has_ranks else 1
        self.fleeting_bytes = sum(self.sizes.values())
        self.gradients = {key: -(-nbytes // ranks) for key, nbytes in self.gradients.items()}
        # A shard has its own storage, whose id is unknown. A negative id stands for it: real ids are positive.
        self.sizes = {-key: -(-nbytes // ranks) for key, nbytes in self.sizes.items()}


class _Run:
    """One run of a forward graph, with the bytes that this run keeps until its backward begins."""

    def __init__(
        self, tally: StepTally, graph: GraphMemory, factor: float, parameters: _Parameters
    ) -> None:
        self.tally, self.name, self.parameters = tally, graph.name, parameters
        self.held = int(graph.held_bytes * factor)
        self.backward_bytes = int(graph.backward_bytes * factor)
        self.retained_bytes = int(graph.retained_bytes * factor)
        self.retained = False  # whether the autograd graph was retained in backward
        # Ids of storages kept for backward; None if the run keeps nothing.
        self.keys: list[int] | None = None

    def begin_backward(self, _: Any) -> None:
        """Add the memory of this run's backward to the tally; autograd calls this method just before backward."""
        self.tally.backward(self)

    # Autograd's graph owns the run: if it is dropped without a backward, the saved bytes are free again.
    def __del__(self) -> None:
        self.tally.release(self)


class StepTally:
    """Tally that adds up the memory of all graphs of a step, and warns if the step exceeds its budget.

    A new step begins when a forward graph runs while no earlier run waits for its backward.

    Args:
        limit: the budget on the peak, in bytes.

    Attributes:
        together: the graphs of a step, which are planned together if the step exceeds the budget.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Re-entrant, since garbage collection may release a run at any time.
        self._lock = threading.RLock()
        self._compiled: weakref.WeakKeyDictionary[GraphMemory, int] = weakref.WeakKeyDictionary()
        # Dict from a storage id to the list [bytes of the storage, number of references].
        self._values: dict[int, list[int]] = {}
        self._bytes = 0  # of the storages in `_values`, of gradients, and of values saved by runs
        self._waiting = 0  # number of runs whose saved values still count
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._parameters: dict[tuple[int, ...], _Parameters] = {}
        self._gradients: dict[int, int] = {}  # bytes by storage id of the parameter
        self.together = StepTogether()
        self._begin()

    def _begin(self) -> None:
        """Begin a step: remove the gradients, the runs and the peak of the last step from the tally."""
        self._alive()
        self._bytes -= sum(self._gradients.values())
        self._gradients = {}
        self._ran: set[tuple[int, ...]] = set()  # keys of `_parameters` in this step
        self._graphs: weakref.WeakSet[GraphMemory] = weakref.WeakSet()
        self._runs = self._peak = 0
        self.together.begin()

    @property
    def runs(self) -> int:
        """Number of forward runs whose backward is pending, plus compiled graphs that have not run yet."""
        return self._waiting + len(self._compiled)

    def other_graphs_bytes(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Return the bytes that other graphs of the step have alive when a new graph runs.

        The returned bytes leave out storages of the new graph's own parameters and inputs.
        """
        with self._lock:
            if not self._waiting:
                self._begin()
            self._forget_others()
            tensors = (*gm.parameters(), *gm.buffers(), *inputs)
            own = {storage_of(v)[0] for v in tensors if isinstance(v, torch.Tensor)}
            shared = sum(self._values[key][0] for key in own if key in self._values)
            return self._bytes - shared + self._alive(own) + sum(self._compiled.values())

    def add(self, graph: GraphMemory, inputs: Sequence[Any]) -> None:
        """Until a new graph first runs, count the bytes that the graph is expected to keep for backward."""
        places = {*graph.parameters, *graph.read}.intersection(range(len(inputs)))
        given = [inputs[k] for k in places if isinstance(inputs[k], torch.Tensor)]
        sizes = dict(map(storage_of, (*graph.own, *given)))
        with self._lock:
            self.together.add(graph.member)
            new = sum(nbytes for key, nbytes in sizes.items() if key not in self._values)
            self._compiled[graph] = graph.held_bytes + new

    def run_in_turn(self, graph: Key, compiled: Sequence[Callable[..., Any]], *args: Any) -> Any:
        """Run a graph with the compiled code of the plan for this run; ``compiled`` has the code of each plan."""
        with self._lock:
            kind = self.together.kind(graph, begins=not self._waiting)
        return compiled[kind](*args)

    def forward(
        self, graph: GraphMemory, arguments: Sequence[Any], outputs: Sequence[Any], node: Any
    ) -> None:
        """Add the memory of one run of a forward graph to the tally, until the run's backward begins.

        Args:
            graph: memory of the graph.
            arguments: arguments of the run.
            outputs: outputs of the run.
            node: the node of autograd's graph that will run backward.
        """
        # If DDP splits graphs, it runs each graph on fake tensors, too; such runs are not tallied.
        if any(isinstance(value, torch_compat.FakeTensor) for value in outputs):
            return
        # Saved-tensor hooks of the user may keep other tensors than the saved ones.
        if torch_compat.saved_tensor_hooks(False) is not None:
            return
        with self._lock:
            if not self._waiting:
                self._begin()
            self._compiled.pop(graph, None)
            self._runs += 1
            self._graphs.add(graph)
            self.together.ran(graph.member, arguments, outputs)
            factor = graph.scaled(arguments, node)
            parameters = self._parameters_of(graph, arguments)
            run = _Run(self, graph, factor, parameters)
            keys: list[int] = []
            passing: list[int] = []  # storages that only forward reads
            for k in graph.values:
                value = arguments[k]
                # An input without autograd history belongs to the user, who keeps it alive.
                is_kept = k in graph.read or value.grad_fn is None
                self._hold(*storage_of(value), keys if is_kept else passing)
            if self._waiting:  # otherwise the graph runs alone, and its plan meets the budget
                taken = int(graph.forward_bytes * factor) + parameters.fleeting_bytes
                self._note(taken, run)
            for key in passing:
                self._drop(key)
            self._waiting += 1
            self._bytes += run.held
            for k, value in enumerate(outputs):
                if isinstance(value, torch.Tensor):
                    key, nbytes = storage_of(value)
                    if k in graph.reread_outputs:
                        self._hold(key, nbytes, keys)
                    self._outputs[key] = (weakref.ref(value), nbytes)
            run.keys = keys
        node.register_prehook(run.begin_backward)

    def _parameters_of(self, graph: GraphMemory, arguments: Sequence[Any]) -> _Parameters:
        """Return the parameters of a graph's run; at the first run with these parameters, tally their bytes."""
        given = [arguments[k] for k in graph.parameters]
        key = (id(graph), *map(id, given))
        self._ran.add(key)
        parameters = self._parameters.get(key)
        if parameters is None:
            parameters = _Parameters((*graph.own, *given))
            self._count(key, parameters)
        return parameters

    def _count(self, key: tuple[int, ...], parameters: _Parameters) -> None:
        """Add the bytes of a group of parameters to the tally; `_forget` removes these bytes."""
        self._parameters[key] = parameters
        for storage, nbytes in parameters.sizes.items():
            self._hold(storage, nbytes)

    def _forget(self, key: tuple[int, ...]) -> None:
        """Remove the bytes of a group of parameters, and of these parameters' gradients, from the tally."""
        parameters = self._parameters.pop(key)
        for storage in parameters.sizes:
            self._drop(storage)
        for storage in parameters.gradients:
            self._bytes -= self._gradients.pop(storage, 0)

    def _count_gradients(self, gradients: Mapping[int, int]) -> None:
        """Add the bytes of gradients to the tally, by storage id of the parameter, unless they are counted already."""
        for key, nbytes in gradients.items():
            if key not in self._gradients:
                self._gradients[key] = nbytes
                self._bytes += nbytes

    # Backward may run inside of a function that Dynamo traces.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(self, run: _Run) -> None:
        """Record the predicted peak of a run's backward, right before backward begins.

        Unless the autograd graph is retained, backward frees the bytes that the run saved, so the tally drops these
        bytes.
        """
        with self._lock:
            if run.keys is None:  # a further backward of the same run
                return
            run.retained = torch_compat.keeps_graph()
            if self._runs > 1 or run.retained:  # otherwise the graph's plan meets the budget
                # Meanwhile FSDP gathers the parameters of the next backward, into a buffer and a copy of the buffer.
                gathered = run.parameters.fleeting_bytes * (3 if self._waiting > 1 else 1)
                own = run.retained_bytes if run.retained else run.backward_bytes
                self._note(own + gathered - run.held, run)
            self._count_gradients(run.parameters.gradients)
            if not run.retained:
                self.release(run)
            if run.retained or not self._waiting:
                self._end(run)

    def _end(self, run: _Run) -> None:
        """End a step: if it exceeded the budget, plan its graphs together, or warn."""
        if self._peak <= self.limit:
            self.together.end()
            return
        sharded = any(parameters.fleeting_bytes for parameters in self._parameters.values())
        members = [graph.member for graph in self._graphs]
        planned = not run.retained and self.together.plan(
            members, self._runs, self._peak, sharded=sharded
        )
        if not planned:
            self._warn(run, at_end=True)
            return
        for graph in self._graphs:
            graph.last_warning.nbytes = self._peak

    def release(self, run: _Run) -> None:
        """Remove the saved bytes of a run, whose backward has begun or will never run, from the tally."""
        with self._lock:
            keys, run.keys = run.keys, None
            if keys is None:
                return
            self._waiting -= 1
            self._bytes -= run.held
            for key in keys:
                self._drop(key)

    def _hold(self, key: int, nbytes: int, keys: list[int] | None = None) -> None:
        """Increment the reference count of a storage; the first reference adds the storage's bytes to the tally."""
        if keys is not None:
            keys.append(key)
        entry = self._values.get(key)
        if entry is None:
            self._values[key] = [nbytes, 1]
            self._bytes += nbytes
        else:
            entry[1] += 1

    def _drop(self, key: int) -> None:
        """Decrement the reference count of a storage; at 0, subtract the storage's bytes from the tally."""
        entry = self._values[key]
        entry[1] -= 1
        if not entry[1]:
            self._bytes -= entry[0]
            del self._values[key]

    def _alive(self, own: set[int] | None = None) -> int:
        """Return the bytes of graph outputs that are still alive, without storages that are in ``_values``."""
        total = 0
        for key, (value, nbytes) in list(self._outputs.items()):
            if value() is None:
                del self._outputs[key]
            elif key not in self._values and (own is None or key not in own):
                total += nbytes
        return total

    def _note(self, running: int, run: _Run) -> None:
        """Record the bytes that the step has alive while a graph runs, and warn if these exceed the budget."""
        taken = self._bytes + self._alive() + running
        if taken > self.limit:
            # The tally may include parameters that this step does not use, or that FSDP has freed.
            before = self._bytes
            self._forget_others()
            taken -= before - self._bytes
        if taken <= self._peak:
            return
        self._peak = taken
        if taken > self.limit and not self.together.can_plan(
            graph.member for graph in self._graphs
        ):
            self._warn(run, at_end=False)

    def _forget_others(self) -> None:
        """From the tally, remove parameters that this step does not read; count freed parameters by their shards."""
        freed = {key[0] for key, parameters in self._parameters.items() if parameters.freed}
        for key, parameters in list(self._parameters.items()):
            if key not in self._ran:
                self._forget(key)
            # FSDP frees the whole parameters after each use of a graph, and keeps shards.
            elif not parameters.fleeting_bytes and key[0] in freed:
                counted = self._gradients.keys() & parameters.gradients
                self._forget(key)
                parameters.shard()
                self._count(key, parameters)
                self._count_gradients({k: parameters.gradients[k] for k in counted})

    def _warn(self, run: _Run, *, at_end: bool) -> None:
        """Warn that the peak of a step exceeds the budget."""
        # The first warning comes as soon as the peak exceeds the budget, another one at the end of a step whose
        # peak has grown by more than a tenth.
        last_warning = LastWarning(
            max((graph.last_warning.nbytes for graph in self._graphs), default=0)
        )
        if (last_warning.nbytes and not at_end) or self._peak <= max(
            self.limit, last_warning.quiet
        ):
            return
        for graph in self._graphs:
            graph.last_warning.nbytes = self._peak
        so_far = "" if at_end else " so far"
        advice = (
            "Graphs that are compiled one by one are planned within what those before them hold, each as if it ran "
            "once in a step. Compile the model as one graph, or plan its graphs together: remat.plan(remat.capture("
            'model, args, fullgraph=False), budget=…), then options={"plan": plans}'
        )
        if any(graph.sizes is not None for graph in self._graphs):
            advice = (
                "Graphs of dynamic sizes are not planned together. With torch.compile(…, dynamic=False), each size has "
                "graphs of its own, which are"
            )
        if run.retained:
            advice = (
                "Backward retained the autograd graph (retain_graph=True), so it freed no saved value, as plans "
                "expect. Do not retain the graph, or give a smaller budget"
            )
        warn(
            f"a step takes {format_bytes(self._peak)} ({self._peak} bytes){so_far}, in {self._runs} runs of compiled "
            f"graphs, '{run.name}' the last of them. That is {format_bytes(self._peak - self.limit)} above the budget "
            f"on its peak, {format_bytes(self.limit)} ({self.limit} bytes). {advice}",
            BudgetWarning,
        )


#: Type of a callback that counts a run of a graph. The callback gets the arguments and the outputs of the run, and the
#: node of autograd's graph that will run backward.
CountRun = Callable[[Sequence[Any], Sequence[Any], Any], None]
_TALLIES: dict[int, StepTally] = {}


def tally_of(limit: int) -> StepTally:
    """Return the `StepTally` of all graphs that are compiled under one budget on the peak.

    Graphs with the same budget share a `StepTally`, whichever model they belong to, because their
    memory adds up if they run in one step.

    Args:
        limit: the budget in bytes.
    """
    return _TALLIES.setdefault(limit, StepTally(limit))

"""Add up the bytes that all graphs of one step have alive, under a budget on the peak in bytes.

A plan states the memory of a single graph. How often a graph runs in a step, and which other memory is then alive, is
known only at run time. Several forward graphs may run before the first backward. The tally includes inputs of all
graphs that ran in the step, saved values, live outputs, gradients of parameters, and allocations of the running graph.
The tally includes neither memory of operators between the graphs nor memory of saved-tensor hooks.
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
        """Whether a parameter that still exists has no memory, because FSDP frees parameters after each use."""
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
        self,
        tally: StepTally,
        graph: GraphMemory,
        factor: float,
        parameters: _Parameters,
        storages: dict[int, int],
    ) -> None:
        self.tally, self.name, self.parameters = tally, graph.name, parameters
        self.storages = storages  # bytes of the inputs and outputs kept for backward, by storage id
        self.held = int(graph.held_bytes * factor)
        self.backward_bytes = int(graph.backward_bytes * factor)
        self.retained_bytes = int(graph.retained_bytes * factor)
        self.retained = False  # whether the autograd graph was retained in backward

    def begin_backward(self, _: Any) -> None:
        """Add the memory of this run's backward to the tally; autograd calls this method just before backward."""
        self.tally.backward(self)


class StepTally:
    """Tally of the memory of all graphs of a step, which warns if the step exceeds its budget.

    A new step begins when a forward graph runs while no earlier run waits for its backward.

    Args:
        limit: the budget on the peak, in bytes.

    Attributes:
        together: the graphs of a step, which are planned together if the step exceeds the budget.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Re-entrant, since a cost model may run compiled code while graphs are planned together.
        self._lock = threading.RLock()
        self._compiled: weakref.WeakKeyDictionary[GraphMemory, int] = weakref.WeakKeyDictionary()
        # Runs whose backward is pending. Autograd's graph owns a run: if it is dropped without a backward, the saved
        # bytes are free again.
        self._waiting: weakref.WeakSet[_Run] = weakref.WeakSet()
        self._outputs: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )  # outputs alive, by storage id
        self._parameters: dict[tuple[int, ...], _Parameters] = {}
        self._sizes: dict[int, int] = {}  # bytes of all `_parameters`, by storage id
        self.together = StepTogether()
        self._begin()

    def _begin(self) -> None:
        """Begin a step: remove the gradients, the runs and the peak of the last step from the tally."""
        self._gradients: dict[int, int] = {}  # bytes by storage id of the parameter
        self._ran: set[tuple[int, ...]] = set()  # keys of `_parameters` in this step
        self._graphs: weakref.WeakSet[GraphMemory] = weakref.WeakSet()
        self._runs = self._peak = 0
        self.together.begin()

    @property
    def runs(self) -> int:
        """Number of forward runs whose backward is pending, plus compiled graphs that have not run yet."""
        return len(self._waiting) + len(self._compiled)

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
            others = {key: nbytes for key, nbytes in self._storages().items() if key not in own}
            shared = sum(self._sizes[key] for key in own if key in self._sizes)
            return self._bytes(others) - shared + sum(self._compiled.values())

    def add(self, graph: GraphMemory, inputs: Sequence[Any]) -> None:
        """Add the bytes that a new graph is expected to keep for backward to the tally, until its first run."""
        places = {*graph.parameters, *graph.read}.intersection(range(len(inputs)))
        given = [inputs[k] for k in places if isinstance(inputs[k], torch.Tensor)]
        sizes = dict(map(storage_of, (*graph.own, *given)))
        with self._lock:
            self.together.add(graph.member)
            alive = self._storages().keys() | self._sizes.keys()
            new = sum(nbytes for key, nbytes in sizes.items() if key not in alive)
            self._compiled[graph] = graph.held_bytes + new

    def run_in_turn(self, graph: Key, compiled: Sequence[Callable[..., Any]], *args: Any) -> Any:
        """Run a graph by the code in ``compiled`` for the plan that was made for this run of the step."""
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
            inputs = dict(storage_of(arguments[k]) for k in graph.values)
            # An input without autograd history belongs to the user, who keeps it alive.
            kept = [k for k in graph.values if k in graph.read or arguments[k].grad_fn is None]
            storages = dict(storage_of(arguments[k]) for k in kept)
            run = _Run(self, graph, factor, parameters, storages)
            if self._waiting:  # otherwise the graph runs alone, and its plan meets the budget
                taken = int(graph.forward_bytes * factor) + parameters.fleeting_bytes
                self._note(taken, run, inputs)
            for k, value in enumerate(outputs):
                if isinstance(value, torch.Tensor):
                    key, nbytes = storage_of(value)
                    if k in graph.reread_outputs:
                        storages[key] = nbytes
                    self._outputs[key] = value
            self._waiting.add(run)
        node.register_prehook(run.begin_backward)

    def _parameters_of(self, graph: GraphMemory, arguments: Sequence[Any]) -> _Parameters:
        """Return the parameters of a graph's run; at the first run with these parameters, tally their bytes."""
        given = [arguments[k] for k in graph.parameters]
        key = (id(graph), *map(id, given))
        self._ran.add(key)
        if key not in self._parameters:
            self._parameters[key] = _Parameters((*graph.own, *given))
            self._sizes |= self._parameters[key].sizes
        return self._parameters[key]

    # Backward may run inside of a function that Dynamo traces.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(self, run: _Run) -> None:
        """Record the predicted peak of a run's backward, right before backward begins.

        The bytes that the run saved are subtracted from the tally, because backward frees them, unless the autograd
        graph is retained.
        """
        with self._lock:
            if run not in self._waiting:  # a further backward of the same run
                return
            run.retained = torch_compat.keeps_graph()
            if self._runs > 1 or run.retained:  # otherwise the graph's plan meets the budget
                # Meanwhile FSDP gathers the parameters of the next backward, into a buffer and a copy of the buffer.
                gathered = run.parameters.fleeting_bytes * (3 if len(self._waiting) > 1 else 1)
                own = run.retained_bytes if run.retained else run.backward_bytes
                self._note(own + gathered - run.held, run, {})
            self._gradients |= run.parameters.gradients
            if not run.retained:
                self._waiting.discard(run)
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

    def _storages(self) -> dict[int, int]:
        """Return the bytes of each storage alive, by id: graph outputs, and inputs and outputs kept for backward."""
        storages = dict(map(storage_of, self._outputs.values()))
        for run in self._waiting:
            storages |= run.storages
        return storages

    def _bytes(self, storages: Mapping[int, int]) -> int:
        """Return the bytes of storages, parameters and gradients, and of the values that runs have saved for backward."""
        # A model has many more parameters than other storages, and each run needs this figure: no dict is copied.
        others = sum(nbytes for key, nbytes in storages.items() if key not in self._sizes)
        saved = sum(run.held for run in self._waiting)
        return others + sum(self._sizes.values()) + sum(self._gradients.values()) + saved

    def _note(self, running: int, run: _Run, inputs: dict[int, int]) -> None:
        """Record the bytes that the step has alive while a graph runs, and warn if these exceed the budget."""
        taken = self._bytes(self._storages() | inputs) + running
        if taken > self.limit:
            # The tally may include parameters that this step does not use, or that FSDP has freed.
            self._forget_others()
            taken = self._bytes(self._storages() | inputs) + running
        if taken <= self._peak:
            return
        self._peak = taken
        if taken > self.limit and not self.together.can_plan(
            graph.member for graph in self._graphs
        ):
            self._warn(run, at_end=False)

    def _forget_others(self) -> None:
        """Remove from the tally parameters that this step does not read; count freed parameters as their shards."""
        freed = {key[0] for key, parameters in self._parameters.items() if parameters.freed}
        self._parameters = {k: p for k, p in self._parameters.items() if k in self._ran}
        self._sizes = {}
        for key, parameters in self._parameters.items():
            # FSDP frees the whole parameters after each use of a graph, and keeps shards.
            if key[0] in freed and not parameters.fleeting_bytes:
                parameters.shard()
                kept = {k: n for k, n in parameters.gradients.items() if k in self._gradients}
                self._gradients |= kept
            self._sizes |= parameters.sizes

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

"""Run times of operators, and which values may or must be offloaded to the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from remat.errors import BudgetError, PlanError
from remat.graph.capture.source import located
from remat.graph.copying import run_of
from remat.graph.costs.base import CostModel
from remat.graph.memory.host_copies import is_pinned
from remat.graph.memory.storages import tensor_bytes
from remat.graph.memory.writes import aliased_argument
from remat.graph.problems.lowering import (
    Lowered,
    Offload,
    SavedKind,
    insists_on_host,
    offload_tags,
    tag_of,
)
from remat.graph.problems.replays import is_element
from remat.passes.core.state import State
from remat.planning.pipelines import step_costs_of
from remat.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """Run times of all operators of a graph, including those that only backward runs.

    Attributes:
        of_name: time of one run of each node of the joint graph, in the cost model's unit, by the node's name.
        cost: the cost model; it also prices operators that passes have added to forward or backward.
    """

    of_name: dict[str, int]
    cost: CostModel

    @classmethod
    def of(cls, state: State, cost: CostModel) -> Times:
        """Compute the run time of every operator of a prepared graph with a cost model.

        Raises:
            ProblemError: the cost model cannot price operators of backward.
        """
        costs = step_costs_of(state, cost, required=True)
        names = (node.name for node in state.index.nodes)
        return cls(of_name=dict(zip(names, costs, strict=True)), cost=cost)

    def of_node(self, node: fx.Node) -> int:
        """Return the time of one run of a node of a forward or backward module.

        For a node that runs a node of the joint graph, ``of_name`` gives the time. For a node that passes have added,
        the time is 0 if the node is a view, takes an element out of a tuple, or does not return a tensor.
        """
        listed = self.of_name.get(run_of(node))
        if listed is not None:
            return listed
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if not is_tensor or is_element(node) or aliased_argument(node) is not None:
            return 0
        return int(self.cost.costs([node])[0])


def why_kept(state: State, lowered: Lowered, i: int) -> str:
    """Return the reason why a value must not be offloaded, as text; empty if the value may be offloaded.

    Only a value that is savable and never written to may be offloaded. The value must be a strided tensor of static
    shape that fills its storage. The value's storage must not be that of an input or output of forward, which stays on
    the device.

    Args:
        state: the prepared graph, as `remat.planning.pipelines.prepare` returns it.
        lowered: the graph problem of ``state``.
        i: the value's position in the graph problem.
    """
    at, storages = lowered.position[i], state.storages
    value, owner = state.index.values[at], storages.owner[at]
    source = state.index.nodes[owner]
    if at == owner and source.op != "call_function":
        return "it is an input, which is alive throughout the step"
    if source.op != "call_function":
        return f"it shares the memory of '{source.name}', which is alive throughout the step"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return "it is no tensor with a memory"
    if storages.alive[owner]:
        return "it shares the memory of an output of forward, which stays on the device"
    if any(type(s) is not int for s in value.shape):
        return "its size is symbolic"
    if owner in storages.mutated:
        return "its memory is written to"
    if not lowered.problem.savable[i] or tensor_bytes(value) != storages.nbytes[owner]:
        return "it has no memory of its own"
    return "" if lowered.problem.size[i] else "it is empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A value that a checkpoint policy, or a policy by module, tags for offloading to the host's memory.

    A tag on a view applies to the node that made the storage of the view. If the node that made the storage is tagged
    for recomputation, a tag on the view applies to the view itself.

    Attributes:
        value: the value to offload, without the places of its copies.
        node: the tagged node, which may be a view of the value.
        must: whether the tag is MUST_CPU_OFFLOAD, so that planning fails if the value is saved but cannot be offloaded.
        why: reason why the value must stay on the device; empty if the value can be offloaded.
    """

    value: Offload
    node: fx.Node
    must: bool
    why: str

    def refusal(self, why: str) -> PlanError:
        """Return the error to raise if a value that must be offloaded stays on the device.

        Args:
            why: the reason for the message, used only if the attribute ``why`` is empty.
        """
        return PlanError(
            f"'{self.value.name}' is tagged for the host's memory by {tag_of(self.node)}, and stays on the device: "
            f"{self.why or why}. Let it be saved, or tag it PREFER_CPU_OFFLOAD\n  {located(self.node)}"
        )


def tagged_values(state: State, lowered: Lowered) -> list[Tagged]:
    """Return the values with a tag for offloading; values with the tag MUST_CPU_OFFLOAD come first."""
    values = []
    for at, node in offload_tags(state.index.nodes, state.storages.owner).items():
        i = lowered.of_position[at]
        if i >= 0 and lowered.kind[i] is SavedKind.VALUE:
            value = Offload(
                name=lowered.problem.names[i],
                nbytes=lowered.problem.size[i],
                pinned=is_pinned(state.index.values[at]),
            )
            must, why = insists_on_host(node), why_kept(state, lowered, i)
            values.append(Tagged(value=value, node=node, must=must, why=why))
    return sorted(values, key=lambda tagged: not tagged.must)


def check_host_memory(limit: int | None, nbytes: int, whose: str) -> None:
    """Raise a BudgetError if the ``nbytes`` bytes that graphs must offload exceed ``limit``, the host's memory."""
    if limit is not None and nbytes > limit:
        raise BudgetError(
            f"host_memory is {format_bytes(limit)} ({limit} bytes), and the values of {whose} that must be offloaded "
            f"take {format_bytes(nbytes)}; raise it to {nbytes}, or tag fewer"
        )


def check_tagged(state: State, lowered: Lowered) -> None:
    """Check that the state's decision offloads every saved value with the tag MUST_CPU_OFFLOAD.

    Raises:
        PlanError: a saved value with this tag stays on the device. The message names the value and the reason.
    """
    assert state.decision is not None
    offloaded, saved = {value.name for value in state.decision.offloads}, set(state.decision.saved)
    for tagged in tagged_values(state, lowered):
        if tagged.must and tagged.value.name in saved - offloaded:
            raise tagged.refusal("a pipeline, and a plan saved without offloading, do not offload")

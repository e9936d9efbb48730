"""Pass that packs saved tensors in forward and unpacks them in backward, by saved-tensor hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from remat.errors import BudgetError, warn
from remat.graph import ops
from remat.graph.joint import JointGraph, output_node
from remat.graph.memory.liveness import saved_storages
from remat.graph.memory.storages import Sizes, hint, storage_key, tensor_bytes
from remat.graph.memory.writes import root_of, written_by
from remat.graph.problems.replays import is_element
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import Analysis, PassResult, State
from remat.passes.hooks.choices import chosen_by
from remat.passes.hooks.inlining import Inlining
from remat.passes.hooks.tracing import Traced, Traces
from remat.passes.packing.pairs import HooksWarning, SavedTensorHooks
from remat.units import format_bytes


@dataclass(frozen=True)
class HookTraces(Analysis[Traces]):
    """FX graphs traced from a pair of hooks: two graphs for each shape, layout, dtype and device of tensors.

    All partitions of one joint graph share the cached traces of hooks.
    """

    name: ClassVar[str] = "hook-traces"

    hooks: SavedTensorHooks

    def compute(self, state: State) -> Traces:
        return Traces(self.hooks, state.joint.lower)


@dataclass(frozen=True)
class PackSaved(Pass):
    """Pack saved tensors in forward and unpack them in backward, by a pair of hooks such as "float8".

    The pack hook runs right after a saved tensor's last use in forward, and the unpack hook right
    before the tensor's first use in backward. Packing therefore lowers the peak memory, and not only the saved bytes.

    A saved tensor is not packed if it shares its storage with another saved tensor, or covers only a
    part of its storage. States of random generators, and tensors that backward writes to, are not
    packed.

    Attributes:
        pair: the hooks, or the name of a ready-made pair.
        filter: which saved tensors to pack (`SavedTensorHooks.filter`); replaces the filter of
            ``pair``.
        min_bytes: tensors with fewer bytes are not packed; replaces the ``min_bytes`` of ``pair``.
    """

    name: ClassVar[str] = "saved-tensor-hooks"
    stage: ClassVar[Stage] = Stage.SPLIT
    keeps_numbers: ClassVar[bool] = False

    pair: SavedTensorHooks | str = "float8"
    filter: str = "donated"
    min_bytes: int = 0

    def __post_init__(self) -> None:
        _ = self.hooks  # the constructors raise for invalid values

    @classmethod
    def of(cls, hooks: SavedTensorHooks) -> PackSaved:
        """Return a pass that applies the given hooks, with the hooks' own ``filter`` and ``min_bytes``."""
        return cls(pair=hooks, filter=hooks.filter, min_bytes=hooks.min_bytes)

    @property
    def hooks(self) -> SavedTensorHooks:
        """The pair of hooks, with the ``filter`` and ``min_bytes`` of this pass."""
        pair = SavedTensorHooks.of(self.pair)
        return replace(pair, filter=self.filter, min_bytes=self.min_bytes)

    def run(self, state: State) -> PassResult:
        forward, backward = state.forward, state.backward
        if forward is None or backward is None:
            return PassResult(state=state, modified=False, detail="not partitioned")
        hooks = self.hooks
        traces = state.get(HookTraces(hooks))
        own = state.joint.num_fwd_outputs
        before = sum(saved_storages(forward, own).values())
        left: Counter[str] = Counter()
        chosen: list[tuple[fx.Node, Traced]] = []
        saved_tensors = SavedTensors(state.joint, forward, backward, traces)
        for saved in saved_tensors.tensors:
            traced = saved_tensors.traced(saved)
            if isinstance(traced, str):
                left[traced] += 1
            else:
                chosen.append((saved, traced))
        _warn(hooks, state.joint.name, [t for _, t in chosen], left)
        with state.edit() as edit:
            # Set here: `edit.result` would report a change if only ``left``, the number of unpacked
            # tensors, is not 0.
            edit.modified = bool(chosen)
            if chosen:
                inlining = Inlining(forward, backward, own)
                for saved, traced in chosen:
                    inlining.add(saved, traced)
                inlining.finish()
        _check_budget(state, hooks)
        after = sum(saved_storages(forward, own).values())
        reasons = "".join(f"; {n} left: {why}" for why, n in left.items())
        return edit.result(
            f"{len(chosen)} tensors packed, {format_bytes(before)} to {format_bytes(after)}{reasons}",
            packed=len(chosen),
            eager=sum(bool(t.eager) for _, t in chosen),
            left=left.total(),
        )


class SavedTensors:
    """Tensors that forward hands to backward, and the facts that decide which of them are packed.

    Attributes:
        tensors: nodes of the saved tensors in forward.
        hooks: the saved-tensor hooks to apply.
        alive: keys of the storages that the filter of the hooks excludes from packing.
        sharing: number of saved tensors on each storage, by the storage's key.
        written: keys of the storages that backward writes to.
        taken: placeholders of backward by name.
        choosing: names of the nodes on whose values a comparison, index or step function of backward
            depends (`chosen_by`).
    """

    def __init__(
        self,
        joint: JointGraph,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        traces: Traces,
    ) -> None:
        self.hooks, self._traces = traces.hooks, traces
        outputs: Any = output_node(forward.graph).args[0]
        self.tensors = [
            v
            for v in outputs[joint.num_fwd_outputs :]
            if isinstance(v, fx.Node) and isinstance(v.meta.get("val"), torch.Tensor)
        ]
        inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
        static = [inputs[i] for i in joint.static_inputs if i < len(inputs)]
        own = [v for v in outputs[: joint.num_fwd_outputs] if isinstance(v, fx.Node)]
        excluded = {"donated": [*inputs, *own], "no_static": static, "all": []}
        self.alive = Sizes().of_all(excluded[self.hooks.filter]).keys()
        self.sharing = Counter(storage_key(v.meta["val"]) for v in self.tensors)
        written = (w for n in backward.graph.nodes for w in written_by(n))
        self.written = Sizes().of_all(written).keys()
        self.taken = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
        choosing = chosen_by(backward.graph, signs=not self.hooks.keeps_signs)
        self.choosing = {n.name for n in choosing}

    def traced(self, node: fx.Node) -> Traced | str:
        """Return the traced hooks for a saved tensor, or the reason why the tensor is not packed."""
        rules = (*RULES, *LOSSY_RULES) if self.hooks.lossy else RULES
        why = next((why for why, leave in rules if leave(self, node)), "")
        if why:
            return why
        trace = self._traces.of(node.meta["val"])
        if trace.unpack is None:
            return "declined"
        grows = trace.packed_bytes >= tensor_bytes(node.meta["val"])
        return "would not get smaller" if grows and (self.hooks.lossy or trace.eager) else trace


def _is_random_state(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is a saved state of a random generator, or a seed."""
    source: Any = node.args[0] if is_element(node) else None
    drawn = getattr(source, "target", None) is torch.ops.higher_order.run_and_save_rng_state
    return (drawn and bool(node.args[1] == 0)) or "inductor_seed" in str(node.target)


def _is_random(node: fx.Node) -> bool:
    """Return whether ``node`` draws random numbers, as a dropout does, or is a view of random numbers."""
    node = root_of(node)
    return ops.is_random(node) or "inductor_rand" in str(node.target)


def _is_part(node: fx.Node) -> bool:
    """Return whether a tensor covers only a part of its storage."""
    value = node.meta["val"]
    return bool(hint(value.untyped_storage().nbytes()) != tensor_bytes(value))


def _is_vector(node: fx.Node) -> bool:
    """Return whether a tensor has at most one dimension larger than 1, or a last dimension of 1."""
    shape = [hint(s) for s in node.meta["val"].shape]
    # Such as a bias, or the means of rows.
    return sum(s > 1 for s in shape) < 2 or shape[-1] == 1


def _is_statistic(node: fx.Node) -> bool:
    """Return whether a tensor is one of several results of an operator, and smaller than the first result."""
    node = root_of(node)
    source = node.args[0] if node.args else None
    if not is_element(node) or not isinstance(source, fx.Node) or node.args[1] == 0:
        return False
    # Such as the logsumexp of attention, which the operator's backward needs at full precision.
    values: Any = source.meta.get("val")
    first = values[0] if isinstance(values, (tuple, list)) and values else None
    return isinstance(first, torch.Tensor) and hint(node.meta["val"].numel()) < hint(first.numel())


#: A rule that keeps a saved tensor unpacked: the reason as text, and a function that returns whether the
#: rule applies. The function's arguments are all saved tensors (`SavedTensors`), and the tensor's node.
_Rule = tuple[str, Callable[[SavedTensors, fx.Node], bool]]

#: Rules for all hooks, lossy or not. The first rule that applies gives the reason.
RULES: tuple[_Rule, ...] = (
    ("without a strided memory", lambda h, n: storage_key(n.meta["val"]) is None),
    ("state of a random generator", lambda h, n: _is_random_state(n)),
    ("kept out by the filter", lambda h, n: storage_key(n.meta["val"]) in h.alive),
    # The next two: packing would take memory for the packed copy without freeing the storage.
    ("shares its memory", lambda h, n: h.sharing[storage_key(n.meta["val"])] > 1),
    ("part of a memory", lambda h, n: _is_part(n)),
    ("written to by backward", lambda h, n: storage_key(n.meta["val"]) in h.written),
    ("not read", lambda h, n: not h.taken[n.name].users),
    # At least 1 byte: an empty tensor is never packed.
    ("small", lambda h, n: tensor_bytes(n.meta["val"]) < max(1, h.hooks.min_bytes)),
)
#: Further rules for lossy hooks.
LOSSY_RULES: tuple[_Rule, ...] = (
    ("not floating-point", lambda h, n: not n.meta["val"].is_floating_point()),
    ("vector", lambda h, n: _is_vector(n)),
    ("statistic", lambda h, n: _is_statistic(n)),
    ("random numbers", lambda h, n: _is_random(n)),
    ("backward chooses by it", lambda h, n: n.name in h.choosing),
)


def _warn(hooks: SavedTensorHooks, graph: str, chosen: list[Traced], left: Counter[str]) -> None:
    """Warn if hooks run outside the compiled graph, or if the pack hook declined every saved tensor."""
    eager = list(dict.fromkeys(t.eager for t in chosen if t.eager))
    if eager:
        warn(
            f"hooks '{hooks.name}' cannot be part of graph '{graph}' and run eagerly, outside of it: "
            f"{eager[0]}. What they keep counts neither as saved bytes nor in the simulated peak",
            HooksWarning,
        )
    if left["declined"] and not chosen:
        warn(
            f"hooks '{hooks.name}' leave graph '{graph}' as it is: pack returned every one of the "
            f"{left['declined']} saved tensors that it was shown unchanged (a pair declines what it "
            "cannot make smaller, cpu-offload what lies in the host's memory already)",
            HooksWarning,
        )


def _check_budget(state: State, hooks: SavedTensorHooks) -> None:
    """Check that forward saves no more bytes, after packing, than the budget allows."""
    capacity = None if state.limits is None else state.limits.capacity
    if capacity is None or state.forward is None:
        return
    n = state.joint.num_fwd_outputs
    saved = sum(saved_storages(state.forward, n, count_outputs=state.count_outputs).values())
    if saved > capacity:
        raise BudgetError(
            f"with hooks '{hooks.name}' forward hands over {saved} bytes, {capacity} are allowed: what "
            "they pack takes more room than before, or was alive anyway (filter "
            f"'{hooks.filter}'). Use filter='donated', hooks that make tensors smaller, or raise the "
            "budget"
        )

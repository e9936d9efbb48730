"""What a whole step takes whatever the batch and the plan: parameters, gradients, and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.errors import BudgetError
from remat.graph.joint import JointGraph, Role, role_of, split_outputs
from remat.graph.storages import storage_bytes, storage_key
from remat.planning.sharding import Sharding, shard
from remat.running.optimizer import Make, OptimizerUse, trace_optimizer
from remat.torch_compat import pytree
from remat.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a step takes whatever the batch and the plan.

    Attributes:
        sharding: parameters, gradients and buffers of collectives.
        use: the optimizer's state, and what its step takes.
    """

    sharding: Sharding
    use: OptimizerUse

    @classmethod
    def of(
        cls,
        model: Any,
        parameters: Sequence[torch.Tensor],
        without_gradient: frozenset[int],
        optimizer: str | Make,
        *,
        ranks: int,
        fsdp: bool,
        foreach: bool,
    ) -> Fixed:
        """What a model and its optimizer take.

        Args:
            model: a module, or a function.
            parameters: its parameters.
            without_gradient: positions of those that get no gradient.
            optimizer: as for `remat.running.optimizer.trace_optimizer`.
            ranks: how many ranks there are.
            fsdp: whether they share the parameters.
            foreach: as for `trace_optimizer`.
        """
        trained = {
            key
            for i, p in enumerate(parameters)
            if i not in without_gradient and (key := storage_key(p)) is not None
        }
        sharding = Sharding.of(model, list(parameters), trained, ranks, fsdp)
        shards = [shard(p, sharding.shards) for p in parameters]
        use = trace_optimizer(optimizer, shards, without_gradient=without_gradient, foreach=foreach)
        return cls(sharding=sharding, use=use)

    @property
    def stepping_bytes(self) -> int:
        """Bytes while the optimizer steps, without inputs and outputs."""
        s = self.sharding
        own = s.parameter_bytes + s.gradient_bytes + s.bucket_bytes
        return own + self.use.state_bytes + self.use.step_bytes

    def check(
        self, memory_bytes: int, name: str, model: Any, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Refuses a memory that the parameters alone do not fit.

        Raises:
            BudgetError: it is smaller; the message says by how much, and how many ranks would do.
        """
        s = self.sharding
        short = s.parameter_bytes - memory_bytes
        if short <= 0:
            return
        trained = {key for p in parameters if p.requires_grad and (key := storage_key(p))}
        shared = Sharding.of(model, list(parameters), trained, max(2, s.ranks), fsdp=True)
        room = memory_bytes - max(shared.gathered_bytes + shared.reduced_bytes, shared.final_bytes)
        advice = "take a smaller model, or a type of fewer bytes"
        if room > 0:
            parts = -(-self.stepping_bytes * s.shards // room)
            advice = (
                f"share them among {parts} ranks or more by FSDP (ranks={parts}, fsdp=True; on the command "
                f"line --ranks {parts} --fsdp), or {advice}"
            )
        raise BudgetError(
            f"the parameters of {name} alone take {format_bytes(s.parameter_bytes)} on a rank, "
            f"{format_bytes(short)} more than the memory of {format_bytes(memory_bytes)}; with gradients and "
            f"the state of {self.use.name} it is {format_bytes(self.stepping_bytes)}: {advice}"
        )


def parameters_of(model: Any, arguments: Any) -> list[torch.Tensor]:
    """Of a module its parameters, of a function the arguments that require a gradient; each once."""
    if isinstance(model, torch.nn.Module):
        return list(model.parameters())
    leaves = pytree.tree_leaves(arguments)
    found = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}
    return list(found.values())


def other_bytes(model: Any, arguments: Any, parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of buffers and inputs that are no parameters."""
    leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        leaves += model.buffers()
    own = {storage_key(p) for p in parameters}
    found = {storage_key(t): storage_bytes(t) for t in leaves}
    return sum(nbytes for key, nbytes in found.items() if key not in own)


def without_gradient(
    model: Any, parameters: Sequence[torch.Tensor], joint: JointGraph | None
) -> frozenset[int]:
    """Positions of the parameters that a step gives no gradient: the frozen ones, and those it does not use.

    Which ones a graph uses is told by their shapes, of which alone there is anything to know.
    """
    frozen = {i for i, p in enumerate(parameters) if not p.requires_grad}
    if joint is None:
        return frozenset(frozen)
    given = Counter(_gradients(joint, only_static=isinstance(model, torch.nn.Module)))
    for i, parameter in enumerate(parameters):
        if i not in frozen:
            key = (tuple(parameter.shape), parameter.dtype)
            if not given[key]:
                frozen.add(i)
            given[key] -= 1
    return frozenset(frozen)


def _gradients(joint: JointGraph, *, only_static: bool) -> Iterator[tuple[Any, torch.dtype]]:
    """Shape and type of the inputs that backward returns a gradient for."""
    primals = [n for n in joint.graph.nodes if n.op == "placeholder" and role_of(n) is Role.PRIMAL]
    returned = split_outputs(joint)[1]
    for i, (node, gradient) in enumerate(zip(primals, returned, strict=False)):
        value = node.meta.get("val")
        if gradient is None or not isinstance(value, torch.Tensor):
            continue
        if i in joint.static_inputs or not only_static:
            yield tuple(map(int, value.shape)), value.dtype

"""Training steps taken apart: what the two halves are really given, and what they really return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import remat
from remat.graph.joint import Role, role_of

Half = Callable[..., Any]


@dataclass(kw_only=True)
class Recorded:
    """What passed through the halves of one compiled step.

    Attributes:
        joint: the joint graph, as the partitioner was handed it.
        inputs: copies of what forward was given.
        tangents: copies of the gradients that backward was given.
        saved_bytes: bytes of the distinct storages that forward returned to backward beyond its
            inputs and its own outputs.
    """

    joint: remat.JointGraph | None = None
    inputs: list[Any] = field(default_factory=list)
    tangents: list[Any] = field(default_factory=list)
    saved_bytes: int = -1

    def run(self, plan: remat.Plan, seed: int = 7) -> dict[str, torch.Tensor]:
        """Runs the halves of a plan on copies of the recorded tensors.

        Returns:
            Everything they leave behind: forward's own outputs, gradients, the inputs as they were
            left, and the state of the generator.
        """
        assert self.joint is not None
        return run_halves(self.joint, plan, self.inputs, self.tangents, seed)


def run_halves(
    joint: remat.JointGraph,
    plan: remat.Plan,
    inputs: Sequence[Any],
    tangents: Sequence[Any],
    seed: int = 7,
) -> dict[str, torch.Tensor]:
    """Runs forward and backward of a plan over static shapes; see `Recorded.run`."""
    torch.manual_seed(seed)
    n = joint.num_fwd_outputs
    given = _copies(inputs)
    with torch.no_grad():
        returned = plan.forward(*given)
        gradients = plan.backward(*returned[n:], *_copies(tangents))
    left = {f"output {i}": v for i, v in enumerate(returned[:n])}
    left |= {f"gradient {i}": v for i, v in enumerate(gradients)}
    left |= {f"input {i}": v for i, v in enumerate(given)}
    left["random state"] = torch.get_rng_state()
    return {k: v for k, v in left.items() if isinstance(v, torch.Tensor)}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """What is not bit for bit the same; NaN equals NaN."""
    names = sorted(one.keys() ^ other.keys())
    return names + [k for k in one if k in other and not _same(one[k], other[k])]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))
    )


def recording_backend(recorded: Recorded, partition: Any) -> Half:
    """A Dynamo backend that runs the halves as they are and takes down what passes through them."""

    def split(
        module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> Any:
        joint = remat.JointGraph(graph_module=module, num_fwd_outputs=num_fwd_outputs)
        recorded.joint = joint.copy()
        return partition(module, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    def forward(module: fx.GraphModule, _: Any) -> Half:
        def run(*args: Any) -> Any:
            recorded.inputs = _copies(args)
            returned = module(*args)
            assert recorded.joint is not None
            n = recorded.joint.num_fwd_outputs
            free = _storages(args) | _storages(returned[:n])
            kept = _storages(returned[n:])
            recorded.saved_bytes = sum(b for k, b in kept.items() if k not in free)
            return returned

        return make_boxed_func(run)

    def take(tangents: Sequence[Any]) -> None:
        recorded.tangents = _copies(tangents)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=showing_tangents(take),
        partition_fn=split,
        keep_inference_input_mutations=True,
    )


def showing_tangents(show: Callable[[Sequence[Any]], None]) -> Callable[..., Half]:
    """A compiler that runs backward as it is, and shows first which tangents it was given."""

    def backward(module: fx.GraphModule, _: Any) -> Half:
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        count = sum(role_of(n) is Role.TANGENT for n in placeholders)

        def run(*args: Any) -> Any:
            show(args[len(args) - count :])
            return module(*args)

        return make_boxed_func(run)

    return backward


def _storages(values: Sequence[Any]) -> dict[int, int]:
    found = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    return {s.data_ptr(): s.nbytes() for s in found}


def _copies(values: Sequence[Any]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]

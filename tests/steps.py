"""Training steps taken apart: what the two halves are really given, and what they really return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import remat
from remat.graph.joint import Role, is_input_mutation, role_of, split_outputs
from remat.graph.memory.storages import tensors_of

Half = Callable[..., Any]


@dataclass(kw_only=True)
class Recorded:
    """What passed through the halves of one compiled step.

    Attributes:
        joint: the joint graph, as the partitioner was handed it; None where nothing was
            differentiated.
        inputs: copies of what forward was given.
        tangents: copies of the gradients that backward was given.
        saved_bytes: bytes of the distinct storages that forward returned to backward beyond its
            inputs and its own outputs.
        left: what the whole step left behind, where its caller notes it.
    """

    joint: remat.JointGraph | None = None
    inputs: list[Any] = field(default_factory=list)
    tangents: list[Any] = field(default_factory=list)
    saved_bytes: int = -1
    left: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, plan: remat.Plan, seed: int = 7) -> dict[str, torch.Tensor]:
        """Runs the halves of a plan on copies of the recorded tensors; see `run_graphs`."""
        assert self.joint is not None
        halves = plan.forward, plan.backward
        return run_graphs(self.joint, *halves, self.inputs, self.tangents, seed)[0]


def run_graphs(
    joint: remat.JointGraph,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    inputs: Sequence[Any],
    tangents: Sequence[Any],
    seed: int = 7,
) -> tuple[dict[str, torch.Tensor], int]:
    """Runs forward and backward as AOTAutograd's runtime calls them: backward takes sizes first.

    Returns:
        What they leave behind (see `left_behind`), and the bytes that were really kept in between,
        beyond inputs and those of forward's own outputs that its caller keeps: new values of inputs
        are copied, and gone.
    """
    torch.manual_seed(seed)
    given, n = copies(inputs), joint.num_fwd_outputs
    returned = interpret(forward, given)
    handed = list(returned[n:])
    described = split_outputs(joint)[2]
    owned = [v for v, d in zip(returned, described, strict=False) if not is_input_mutation(d)]
    free = memories([*given, *owned])
    kept = sum(nbytes for k, nbytes in memories(handed).items() if k not in free)
    sizes = [v for v in handed if not isinstance(v, torch.Tensor)]
    tensors = [v for v in handed if isinstance(v, torch.Tensor)]
    gradients = interpret(backward, [*sizes, *tensors, *copies(tangents)])
    return left_behind(returned[:n], gradients, given), kept


def run_joint(
    joint: remat.JointGraph, inputs: Sequence[Any], tangents: Sequence[Any], seed: int = 7
) -> dict[str, torch.Tensor]:
    """Runs the joint graph as it is: the reference for every plan."""
    torch.manual_seed(seed)
    given, n = copies(inputs), joint.num_fwd_outputs
    returned = interpret(joint.graph_module, [*given, *copies(tangents)])
    return left_behind(returned[:n], returned[n:], given)


def left_behind(
    outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """Forward's own outputs, gradients, inputs as they were left, and the state of the generator."""
    left = {f"output {i}": v for i, v in enumerate(outputs)}
    left |= {f"gradient {i}": v for i, v in enumerate(gradients)}
    left |= {f"input {i}": v for i, v in enumerate(inputs)}
    left["random state"] = torch.get_rng_state()
    return {k: v for k, v in left.items() if isinstance(v, torch.Tensor)}


def interpret(module: fx.GraphModule, args: Sequence[Any]) -> Sequence[Any]:
    """Runs a graph node by node; generating its code would take longer."""
    with torch.no_grad():
        return fx.Interpreter(module).run(*args, enable_io_processing=False)  # type: ignore[no-any-return]


def memories(values: Sequence[Any]) -> dict[int, int]:
    """Bytes of the distinct storages of tensors."""
    found = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    return {s._cdata: s.nbytes() for s in found}


def copies(values: Sequence[Any]) -> list[Any]:
    """Tensors with the same strides, numbers as they are; what shares memory shares its copy."""
    made: dict[int, torch.Tensor] = {}
    found: list[Any] = []
    for v in values:
        if not isinstance(v, torch.Tensor):
            found.append(v)
            continue
        storage = v.untyped_storage()
        memory = made.setdefault(
            storage._cdata, torch.empty(0, dtype=torch.uint8).set_(storage.clone())
        )
        base = torch.empty(0, dtype=v.dtype).set_(memory.untyped_storage())
        found.append(base.as_strided(v.shape, v.stride(), v.storage_offset()))
    return found


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
    return aot_autograd(  # type: ignore[no-any-return]
        **recording(recorded, partition), keep_inference_input_mutations=True
    )


def recording(recorded: Recorded, partition: Any) -> dict[str, Any]:
    """The arguments of AOTAutograd by which halves run as they are and are recorded."""

    def split(
        module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> Any:
        assert recorded.joint is None, "a program is one graph"
        joint = remat.JointGraph(graph_module=module, num_fwd_outputs=num_fwd_outputs)
        recorded.joint = joint.copy()
        return partition(module, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    def forward(module: fx.GraphModule, _: Any) -> Half:
        def run(*args: Any) -> Any:
            recorded.inputs = copies(args)
            returned = module(*args)
            assert recorded.joint is not None
            n = recorded.joint.num_fwd_outputs
            free = memories(args) | memories(returned[:n])
            kept = memories(returned[n:])
            recorded.saved_bytes = sum(b for k, b in kept.items() if k not in free)
            return returned

        return make_boxed_func(run)

    def backward(module: fx.GraphModule, _: Any) -> Half:
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        count = sum(role_of(n) is Role.TANGENT for n in placeholders)

        def run(*args: Any) -> Any:
            recorded.tangents = copies(args[len(args) - count :])
            return module(*args)

        return make_boxed_func(run)

    return {"fw_compiler": forward, "bw_compiler": backward, "partition_fn": split}


def measure_held(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> int:
    """Run forward and return the bytes that autograd holds until backward.

    Each storage counts once. Storages of parameters, buffers, inputs and outputs do not count.

    Args:
        fn: a module or function.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
    """
    named = dict(kwargs or {})
    kept: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = fn(*args, **named)
    given = tensors_of((tuple(args), named, out))
    if isinstance(fn, torch.nn.Module):
        given += [*fn.parameters(), *fn.buffers()]
    there = {t.untyped_storage().data_ptr() for t in given}
    sizes = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in kept)}
    return sum(nbytes for key, nbytes in sizes.items() if key not in there)

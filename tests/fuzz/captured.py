"""Random programs run through AOTAutograd: what the partitioner is handed, and what the halves are given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function

import remat
from remat.graph.joint import is_input_mutation, split_outputs
from tests.fuzz import functions
from tests.fuzz.program import Program, run_step
from tests.steps import showing_tangents

#: Splits a joint graph into forward and backward.
Split = Callable[[remat.JointGraph], tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way through AOTAutograd.

    Attributes:
        dynamo: trace with Dynamo, which alone knows checkpointed regions.
        decompose: with Inductor's decompositions.
        dynamic: with symbolic sizes.
        writes_in_graph: mutations of inputs are part of forward, not of its epilogue.
    """

    dynamo: bool = False
    decompose: bool = False
    dynamic: bool = False
    writes_in_graph: bool = True


@dataclass(kw_only=True)
class Captured:
    """One step of one program.

    Attributes:
        joint: the joint graph as the partitioner got it; None where nothing was differentiated.
        primals: copies of what forward was given.
        tangents: copies of the gradients that backward was given.
        left: what the whole step left behind.
    """

    joint: remat.JointGraph | None = None
    primals: list[Any] = field(default_factory=list)
    tangents: list[Any] = field(default_factory=list)
    left: dict[str, torch.Tensor] = field(default_factory=dict)


def run_through(program: Program, way: Way, split: Split) -> Captured:
    """Runs a program through AOTAutograd with the halves that ``split`` makes."""
    found = Captured()

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        joint = remat.JointGraph(
            graph_module=module,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=tuple(more.get("static_lifetime_input_indices") or ()),
        )
        assert found.joint is None, "a program is one graph"
        found.joint = joint.copy()
        return split(joint)

    def forward(module: fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            found.primals = copies(args)
            return module(*args)

        return make_boxed_func(run)

    def take(tangents: Sequence[Any]) -> None:
        found.tangents = copies(tangents)

    table = None
    if way.decompose:
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
    options: dict[str, Any] = {
        "fw_compiler": forward,
        "bw_compiler": showing_tangents(take),
        "partition_fn": partition,
        "decompositions": table,
        "keep_inference_input_mutations": way.writes_in_graph,
    }
    weights, args = program.tensors()
    with warnings.catch_warnings():
        # AOTAutograd looks at .grad of inputs that are no leaves.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
        # Dynamo makes an instance of every custom function.
        warnings.filterwarnings("ignore", message=r".*Function'> should not be instantiated")
        if way.dynamo:
            torch._dynamo.reset()
            backend = aot_autograd(**options)
            step = torch.compile(
                program.function(functions.checkpoint),
                backend=backend,
                fullgraph=True,
                dynamic=way.dynamic,
            )
        else:
            step = aot_function(program.function(functions.plainly), dynamic=way.dynamic, **options)
        found.left = run_step(step, weights, args)
    return found


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


def run_joint(
    joint: remat.JointGraph, captured: Captured, seed: int = 7
) -> dict[str, torch.Tensor]:
    """Runs the joint graph as it is: the reference for every plan."""
    functions.begin_run(seed)
    primals = copies(captured.primals)
    out = interpret(joint.graph_module, [*primals, *copies(captured.tangents)])
    n = joint.num_fwd_outputs
    return named(out[:n], out[n:], primals)


def run_halves(
    joint: remat.JointGraph,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    captured: Captured,
    seed: int = 7,
) -> tuple[dict[str, torch.Tensor], int]:
    """Runs forward and backward as AOTAutograd's runtime calls them: backward takes sizes first.

    Returns:
        What they leave behind, and the bytes that were really kept in between, beyond inputs and
        those of forward's own outputs that its caller keeps: new values of inputs are copied, and
        gone.
    """
    functions.begin_run(seed)
    primals = copies(captured.primals)
    n = joint.num_fwd_outputs
    returned = interpret(forward, primals)
    handed = list(returned[n:])
    described = split_outputs(joint)[2]
    owned = [v for v, d in zip(returned, described, strict=False) if not is_input_mutation(d)]
    free = memories([*primals, *owned])
    kept = sum(nbytes for k, nbytes in memories(handed).items() if k not in free)
    sizes = [v for v in handed if not isinstance(v, torch.Tensor)]
    tensors = [v for v in handed if isinstance(v, torch.Tensor)]
    gradients = interpret(backward, [*sizes, *tensors, *copies(captured.tangents)])
    return named(returned[:n], gradients, primals), kept


def memories(values: Sequence[Any]) -> dict[int, int]:
    """Bytes of the distinct storages of tensors."""
    found = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    return {s._cdata: s.nbytes() for s in found}


def interpret(module: fx.GraphModule, args: Sequence[Any]) -> Sequence[Any]:
    """Runs a graph node by node; generating its code would take longer."""
    with torch.no_grad():
        return fx.Interpreter(module).run(*args, enable_io_processing=False)  # type: ignore[no-any-return]


def named(
    outputs: Sequence[Any], gradients: Sequence[Any], primals: Sequence[Any]
) -> dict[str, torch.Tensor]:
    found = {f"output {k}": v for k, v in enumerate(outputs)}
    found |= {f"gradient {k}": v for k, v in enumerate(gradients)}
    found |= {f"input {k}": v for k, v in enumerate(primals)}
    found["random state"] = torch.get_rng_state()
    found["calls"] = functions.calls()
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}

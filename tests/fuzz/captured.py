"""Random programs run through AOTAutograd: what the partitioner is handed, and what the halves are given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function

import remat
from remat.torch_compat import functorch_config
from tests import steps
from tests.fuzz import functions
from tests.fuzz.program import Program, run_step
from tests.steps import Recorded, recording

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


def run_through(program: Program, way: Way, split: Split) -> Recorded:
    """Runs a program through AOTAutograd with the halves that ``split`` makes."""
    found = Recorded()

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        joint = remat.JointGraph(
            graph_module=module,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=tuple(more.get("static_lifetime_input_indices") or ()),
        )
        found.joint = joint.copy()
        return split(joint)

    table = None
    if way.decompose:
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
    options: dict[str, Any] = {
        **recording(found, partition),
        "decompositions": table,
        "keep_inference_input_mutations": way.writes_in_graph,
    }
    weights, args = program.tensors()
    # `remat.graph.capture.tangents` says why.
    kept = functorch_config.patch(guess_tangent_strides_as_outputs=False)
    with quiet(), kept:
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


@contextmanager
def quiet() -> Iterator[None]:
    """Ignores what PyTorch warns of while it traces and compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.PeakWarning)
        # AOTAutograd looks at .grad of inputs that are no leaves.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
        # Dynamo makes an instance of every custom function.
        warnings.filterwarnings("ignore", message=r".*Function'> should not be instantiated")
        # Importing Inductor imports a deprecated corner of torch.jit.
        warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
        yield


def run_joint(joint: remat.JointGraph, recorded: Recorded) -> dict[str, torch.Tensor]:
    """Runs the joint graph as it is, and counts the calls of custom operators."""
    functions.begin_run()
    left = steps.run_joint(joint, recorded.inputs, recorded.tangents)
    return left | {"calls": functions.calls()}


def run_graphs(
    joint: remat.JointGraph, forward: fx.GraphModule, backward: fx.GraphModule, recorded: Recorded
) -> tuple[dict[str, torch.Tensor], int]:
    """As `tests.steps.run_graphs`; counts the calls of custom operators as well."""
    functions.begin_run()
    left, kept = steps.run_graphs(joint, forward, backward, recorded.inputs, recorded.tangents)
    return left | {"calls": functions.calls()}, kept

"""Functions that each parse one option of planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from remat.errors import ProblemError
from remat.graph.costs.links import Link
from remat.graph.policies import read_policies
from remat.passes.core.pipeline import Pipeline
from remat.passes.joint.chunk_loss import ChunkLoss
from remat.passes.packing.pairs import SavedTensorHooks
from remat.passes.split.join import Join
from remat.passes.split.partition import Partition
from remat.planning.pipelines import PassManager
from remat.plugins.registry import registry
from remat.solvers.run import check_time_limit
from remat.units import Budget, parse_bytes


def _read_seconds(given: float) -> float:
    check_time_limit(given)
    return given


def _read_reread(given: object) -> bool:
    if type(given) is not bool:
        raise ProblemError(
            f"reread_inputs is {given!r}; expected True (backward may read the inputs of the step again) or False "
            "(it may not, so that they can be overwritten before it)"
        )
    return given


def _read_bytes(given: object) -> int:
    nbytes = parse_bytes(given) if isinstance(given, str) else given
    if type(nbytes) is not int or nbytes < 0:
        raise ProblemError(
            f"host_memory is {given!r}; expected the bytes that may lie in the host's memory at one time, such as "
            "'64GiB'"
        )
    return nbytes


def _read_chunk(given: object) -> ChunkLoss | Literal["auto"] | None:
    """Parse the option ``chunk``; return the pass that splits the loss, ``"auto"``, or None to leave the loss whole."""
    if given == "auto" or isinstance(given, ChunkLoss):
        return given
    chunks = int(given) if isinstance(given, str) and given.isdigit() else given
    if type(chunks) is not int or chunks < 1:
        raise ProblemError(f"chunk is {given!r}; expected a number of chunks, such as 8, or 'auto'")
    return None if chunks == 1 else ChunkLoss(chunks=chunks)


def _read_pipeline(given: str | Pipeline) -> Pipeline:
    pipeline = PassManager.parse(given) if isinstance(given, str) else given
    if not isinstance(pipeline, Pipeline):
        raise ProblemError(
            f"pipeline is a {type(given).__name__}; expected text, for example 'dce,cse,min-cut,partition', or a "
            "remat.PassManager"
        )
    if any(isinstance(p, Join) for p in pipeline.flat()):
        raise ProblemError(
            f"pipeline '{pipeline}' joins the graphs of its plan: leave out 'join'; remat.rematerialize joins them itself, "
            "and PassManager.run takes a pipeline with 'join'"
        )
    if not any(isinstance(p, Partition) for p in pipeline.flat()):
        raise ProblemError(
            f"pipeline '{pipeline}' does not partition: put 'partition' behind what decides"
        )
    return pipeline


#: Functions that parse an option by itself. `PlanRequest.of` has those of the other options.
READERS: Mapping[str, Callable[[Any], object]] = {
    "budget": Budget.parse,
    "cost": lambda given: registry().cost_model(given),
    "time_limit": _read_seconds,
    "pipeline": _read_pipeline,
    "hooks": SavedTensorHooks.of,
    "reread_inputs": _read_reread,
    "offload": Link.parse,
    "host_memory": _read_bytes,
    "policies": read_policies,
    "chunk": _read_chunk,
}

"""The Dynamo backend ``"remat"``: graphs split by our partitioner, run as they are or by Inductor."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.capture import LOWERINGS
from remat.graph.capture_errors import name_plain_failure
from remat.graph.joint import JointGraph, copy_module
from remat.integrations.budget_loop import CompiledBudget, compile_within_budget
from remat.integrations.partitioner import CompiledGraphs, Partitioner, StepPartition, partitioner
from remat.integrations.step_guards import around_autograd, at_declared_sizes, guard_sizes
from remat.passes.ranks.agree_ranks import AgreeRanks
from remat.planning.plan import Plan
from remat.planning.planner import plan_graph
from remat.planning.request import PlanRequest

_LOCK = threading.Lock()
#: The graphs that were compiled under the same options, for as long as a step of theirs is there, by those options.
_GRAPHS: weakref.WeakValueDictionary[int, CompiledGraphs] = weakref.WeakValueDictionary()

#: Options of the backend that are ours; every other one is Inductor's.
OPTIONS = (*inspect.signature(partitioner).parameters, "lower")
#: Memory that Inductor keeps for a later result of the same size, by an estimate that knows nothing of what
#: attention and convolutions take beside their results. Without it memory is free as soon as nobody reads it.
_KEPT_MEMORY = "allow_buffer_reuse"


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend behind ``torch.compile(model, backend="remat", options=…)``.

    Options: ``budget``, ``solver``, ``cost``, ``time_limit``, ``plan``, ``pipeline``,
    ``rank_wait_s``, ``hooks``, ``reread_inputs``, ``repro``, ``offload``, ``strict`` as in `partitioner`;
    ``lower``: ``"inductor"`` (default) or ``"eager"`` (run the planned graphs as they are). Every
    other option, and ``mode``, goes to Inductor.

    Raises:
        RematError: an option that cannot be meant.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ProblemError(
            f"options is {options!r}; expected a dict of options by name, such as "
            'torch.compile(model, backend="remat", options={"budget": "40GiB"})'
        )
    given = dict(options or {})
    ours = {k: given.pop(k) for k in OPTIONS if k in given}
    lower = ours.get("lower", "inductor")
    if lower not in LOWERINGS:
        raise ProblemError(
            f"option 'lower' is {lower!r}; expected one of {', '.join(map(repr, LOWERINGS))}"
        )
    partition = Partitioner(**{**ours, "lower": lower})
    partition.graphs = CompiledGraphs() if options is None else _graphs(options)
    known = CompiledBudget()
    step = StepPartition(partition, _plan if lower == "eager" else known.plan, watched=True)
    step.join(gm, example_inputs)
    if lower == "eager":
        _refuse_unknown(given)
        if given or mode is not None:
            names = ", ".join(repr(k) for k in given) or f"mode={mode!r}"
            raise ProblemError(
                f"lower='eager' does not use Inductor, but {names} is for it; known options of remat: "
                f"{', '.join(OPTIONS)}"
            )
    with at_declared_sizes(example_inputs, in_bytes=partition.in_bytes):
        try:
            if lower == "eager":
                compiled = _compile_eager(gm, example_inputs, step)
            else:
                patches = _inductor_options(partition, given, mode)
                compiled = compile_within_budget(step, known, gm, example_inputs, patches)
        except Exception as error:
            name_plain_failure(error, gm, example_inputs, lower)
            raise
        # Its plan has modules for as long as the compiled step is there; see `remat.plans`. What wraps the
        # step, Dynamo takes off.
        with contextlib.suppress(AttributeError):
            torch_compat.innermost_fn(compiled).partitioned = step  # type: ignore[attr-defined]
        made = step.made
        if made is None:
            return compiled
        with step.compiling():
            step.warn_if_over()
            look = guard_sizes(example_inputs, made, saved=step.applies_saved, watched=True)
        return around_autograd(
            compiled,
            made.reread_outputs,
            made.graph,
            by_inductor=lower == "inductor",
            reread_inputs=made.reread_inputs,
            count=step.count_runs(gm, example_inputs),
            look=look,
        )


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuses options that are neither ours nor Inductor's.

    Raises:
        ProblemError: there is one; the message names what may be meant.
    """
    if not options:
        return
    theirs = torch_compat.list_options()
    for name in options:
        if not isinstance(name, str) or name.replace("-", "_") not in theirs:
            written = str(name).replace("-", "_")
            # Of two that are as near, ours: Inductor has hundreds.
            near = [
                match
                for names in (OPTIONS, theirs)
                for match in difflib.get_close_matches(written, names, n=1)
            ]
            near.sort(key=lambda match: -difflib.SequenceMatcher(None, written, match).ratio())
            meant = f"; did you mean '{near[0]}'?" if near else ""
            raise ProblemError(
                f"option {name!r} is known to neither remat ({', '.join(OPTIONS)}) nor Inductor "
                f"(torch._inductor.list_options() lists its options){meant}"
            )


def _graphs(options: Mapping[str, Any]) -> CompiledGraphs:
    """The graphs compiled under these options: Dynamo hands over the same object each time."""
    with _LOCK:
        return _GRAPHS.setdefault(id(options), CompiledGraphs(options=options))


def _plan(joint: JointGraph, request: PlanRequest, agree: AgreeRanks | None) -> Plan:
    return plan_graph(joint, request, in_place=True, agree=agree)


def _compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], step: StepPartition
) -> Callable[..., Any]:
    compiled = torch_compat.aot_autograd(
        fw_compiler=lambda module, _: _boxed(module),
        partition_fn=step,
        keep_inference_input_mutations=True,
    )
    with step.compiling():
        return compiled(gm, example_inputs)


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Runs one half as it is and takes its arguments over, so that each is freed after its last use.

    Called with arguments of their own, the caller would keep what was saved to the end of backward.
    """
    graph = copy_module(module).graph
    graph.set_codegen(torch_compat.BoxedCodeGen())
    half = fx.GraphModule(module, graph)

    def run(arguments: list[Any]) -> Any:
        return half.forward(arguments)

    torch_compat.mark_boxed(run)
    return run


def _inductor_options(
    partition: Partitioner, options: Mapping[str, Any], mode: str | None
) -> dict[str, Any]:
    """Settings of Inductor for a step, among them those that the user asked for.

    Raises:
        ProblemError: an option that is neither ours nor Inductor's.
    """
    _refuse_unknown(options)
    known = torch_compat.list_options()
    patches: dict[str, Any] = {_KEPT_MEMORY: False} if _KEPT_MEMORY in known else {}
    patches.update(torch_compat.list_mode_options(mode) if mode else {})
    patches.update({k.replace("-", "_"): v for k, v in options.items()})
    if not partition.cacheable:
        patches["fx_graph_cache"] = patches["fx_graph_remote_cache"] = False
    return patches

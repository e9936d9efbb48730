"""The Dynamo backend ``"remat"``: graphs split by our partitioner, run as they are or by Inductor."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.errors import PlanError, ProblemError
from remat.graph.capture import LOWERINGS
from remat.graph.capture_errors import name_plain_failure
from remat.graph.joint import copy_module
from remat.graph.regions import calls_regions
from remat.integrations import kept_steps
from remat.integrations.compiled_memory import CompiledHalf
from remat.integrations.kept_steps import traces_of
from remat.integrations.partitioner import Partitioner, Siblings, partitioner
from remat.integrations.step_guards import around_autograd, at_declared_sizes, guard_sizes
from remat.integrations.workarounds import compile_half, masks_from_bytes, masks_to_bytes
from remat.planning.plan import Plan

_LOCK = threading.Lock()
_SIBLINGS: dict[int, tuple[Mapping[str, Any], Siblings]] = {}

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
    partition.siblings = Siblings() if options is None else _siblings(options)
    partition.watched = True
    partition.join_step(gm, example_inputs)
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
                compiled = _compile_eager(gm, example_inputs, partition)
            else:
                compiled = _compile_inductor(gm, example_inputs, partition, given, mode)
        except Exception as error:
            name_plain_failure(error, gm, example_inputs, lower)
            raise
        # Its plan has modules for as long as the compiled step is there; see `remat.plans`. What wraps the
        # step, Dynamo takes off.
        with contextlib.suppress(AttributeError):
            torch_compat.innermost_fn(compiled).partitioner = partition  # type: ignore[attr-defined]
        made = partition.made
        if made is None:
            return compiled
        with partition.compiling():
            partition.warn_if_over()
            look = guard_sizes(example_inputs, made, saved=partition.applies_saved, watched=True)
        return around_autograd(
            compiled,
            made.reread_outputs,
            made.graph,
            by_inductor=lower == "inductor",
            reread_inputs=made.reread_inputs,
            count=partition.count_runs(gm, example_inputs),
            look=look,
        )


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuses options that are neither ours nor Inductor's.

    Raises:
        ProblemError: there is one; the message names what may be meant.
    """
    if not options:
        return
    from remat.torch_compat import list_options

    theirs = list_options()
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


def _siblings(options: Mapping[str, Any]) -> Siblings:
    """The graphs compiled under these options: Dynamo hands the same object each time."""
    with _LOCK:
        kept = _SIBLINGS.setdefault(id(options), (options, Siblings()))
        while len(_SIBLINGS) > 64:
            del _SIBLINGS[next(iter(_SIBLINGS))]
    return kept[1]


def _compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partition: Partitioner
) -> Callable[..., Any]:
    from remat.torch_compat import aot_autograd

    compiled = aot_autograd(
        fw_compiler=lambda module, _: _boxed(module),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with partition.compiling():
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


def _compile_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partitioner,
    options: dict[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    from remat.torch_compat import list_mode_options, list_options

    _refuse_unknown(options)
    known = list_options()
    patches: dict[str, Any] = {_KEPT_MEMORY: False} if _KEPT_MEMORY in known else {}
    patches.update(list_mode_options(mode) if mode else {})
    patches.update({k.replace("-", "_"): v for k, v in options.items()})
    patches["custom_partitioner_fn"] = partition
    if not partition.cacheable:
        patches["fx_graph_cache"] = patches["fx_graph_remote_cache"] = False
    functorch: dict[str, Any] = {}
    # Regions are compiled with the halves that they are in, which are then more than two.
    regions = calls_regions(gm)
    if regions:
        # Inductor takes the places of the inputs that backward may overwrite for places among the
        # inputs of a region's backward too, and overwrites what is still to be read.
        functorch["donated_buffer"] = False
    # Backward too is compiled before forward runs: what the step takes is known in time.
    functorch["force_non_lazy_backward_lowering"] = True
    tried: list[tuple[int, Plan, Callable[..., Any]]] = []
    with partition.compiling():
        while True:
            compiled = _compile_once(gm, example_inputs, partition, patches, functorch, regions)
            made = partition.made
            again = partition.replans()
            if made is not None:
                tried.append((partition.by_peak(made), made, compiled))
            if again:
                continue
            if len(tried) > 1 and made is not None and partition.takes_least:
                # The budget is held as nearly as can be: what was planned again may take more.
                _, best, compiled = min(tried, key=lambda one: one[0])
                if best is not made:
                    partition.use(best)
            return compiled


def _compile_once(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partitioner,
    patches: dict[str, Any],
    functorch: dict[str, Any],
    regions: bool,
) -> Callable[..., Any]:
    """Plans and compiles a step, or finds it in a cache, and tells the partition what it takes."""
    from remat.torch_compat import compile_fx, functorch_config

    partition.keeps = partition.keeps_steps and not regions
    step = _Step(partition, whole=not regions)

    def compiled_with(changes: dict[str, Any]) -> Callable[..., Any]:
        with functorch_config.patch(changes):
            return compile_fx(  # type: ignore[return-value]
                gm, example_inputs, inner_compile=step.compile_half, config_patches=patches
            )

    if partition.keeps:
        partition.traces = traces_of(gm, example_inputs)
        compiled = compiled_with(functorch)
        if step.is_new:
            step.finish()
            return compiled
        if _restore(partition, gm, compiled):
            return compiled
        partition.keeps, partition.traces = False, ""
    partition.halves_only = True
    # Whoever finds a step in AOTAutograd's cache is not asked to partition, and `plans()` would not
    # know what the step runs on. Inductor's own cache of compiled halves stays in use.
    compiled = compiled_with({**functorch, "enable_autograd_cache": False})
    if not regions:
        step.finish()
    return compiled


class _Step:
    """One compilation by Inductor, which ends with both halves known to its cache, or with neither new.

    Args:
        partition: who splits the step.
        whole: whether it has two halves and no more: forward is compiled first.
    """

    def __init__(self, partition: Partitioner, *, whole: bool) -> None:
        self._partition = partition
        self._whole = whole
        self._halves: list[tuple[CompiledHalf, str | None]] = []
        self._masks: frozenset[str] = frozenset()
        self._compiled = False

    @property
    def is_new(self) -> bool:
        """Whether something was planned or compiled, so that it was not found in AOTAutograd's cache."""
        return self._compiled or self._partition.called

    def compile_half(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """As `workarounds.compile_half`; notes what it came to."""
        self._compiled, self._partition.traces = True, ""
        half = CompiledHalf.of(gm, example_inputs)
        gm = copy_module(gm)
        if self._whole and not self._halves:
            self._masks = masks_to_bytes(gm.graph, half.own)
        elif self._whole:
            example_inputs = masks_from_bytes(gm.graph, example_inputs, self._masks)
        compiled = compile_half(gm, example_inputs, **kwargs)
        half.code = getattr(compiled, "source_code", "")
        half.constants = getattr(compiled, "constants", None) or {}
        self._halves.append((half, kept_steps.key_of(compiled)))
        return compiled

    def finish(self) -> None:
        """Tells what both halves take together, and keeps what belongs to the step."""
        if len(self._halves) != 2:
            return
        (forward, _), (backward, _) = self._halves
        self._partition.note_memory(forward, backward)
        keys = [key for _, key in self._halves if key is not None]
        kept = self._partition.kept
        # What is not kept is planned again by whoever finds the step in a cache, and then compiled otherwise.
        made = self._partition.made
        if (
            made is not None and made.learns_sizes
        ):  # only who planned the step knows which sizes to look at
            return
        if kept is not None and len(keys) == 2 and not self._partition.is_open:
            kept_steps.keep(keys, kept)


def _restore(partition: Partitioner, gm: fx.GraphModule, compiled: Any) -> bool:
    """Restores the plan of a step from AOTAutograd's cache; False where that cannot be done."""
    halves = kept_steps.halves_of(compiled)
    if halves is None:
        return False
    if len(halves) == 1:  # nothing to differentiate
        return True
    kept = kept_steps.find(halves)
    if kept is None:
        return False
    try:
        partition.restore(kept, gm)
    except PlanError:
        return False
    return True

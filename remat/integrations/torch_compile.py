"""The Dynamo backend ``"remat"``: graphs split by our partitioner, run as they are or by Inductor."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PlanError, ProblemError
from remat.graph import ops
from remat.graph.capture import LOWERINGS
from remat.graph.capture_errors import name_plain_failure
from remat.graph.host_copies import OFFLOAD, RELOAD
from remat.graph.joint import copy_module, outputs_of
from remat.graph.regions import calls_regions
from remat.graph.storages import hint
from remat.graph.writes import root_of
from remat.integrations import autotune, inductor_kernels, kept_steps
from remat.integrations.around_autograd import around_autograd
from remat.integrations.compiled_memory import CompiledHalf
from remat.integrations.kept_steps import traces_of
from remat.integrations.masks import masks_from_bytes, masks_to_bytes
from remat.integrations.partitioner import Partitioner, Siblings, partitioner
from remat.integrations.size_guards import at_declared_sizes, guard_sizes
from remat.planning.plan import Plan
from remat.plugins.identity import described, surroundings

_LOCK = threading.Lock()
_SIBLINGS: dict[int, tuple[Mapping[str, Any], Siblings]] = {}

#: Options of the backend that are ours; every other one is Inductor's.
OPTIONS = (*inspect.signature(partitioner).parameters, "lower", "autotune")


#: Inductor's vectorised ends of loops on a CPU. See `_scans`.
_MASKED_TAILS = "cpp.enable_loop_tail_vec"
#: Memory that Inductor keeps for a later result of the same size, by an estimate that knows nothing of what
#: attention and convolutions take beside their results. Without it memory is free as soon as nobody reads it.
_KEPT_MEMORY = "allow_buffer_reuse"
#: Operators that may read or write every so-manyth element, and where their arguments say so.
_STEPS = {
    torch.ops.aten.slice.Tensor: 4,
    torch.ops.aten.slice_scatter.default: 5,
    torch.ops.aten.slice_backward.default: 5,
}


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
    ``autotune``: compile up to so many plans that fit, time them on these inputs, and keep the fastest;
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
    count = autotune.asked(ours.pop("autotune", None), ours, mode)
    siblings = Siblings() if options is None else _siblings(options)

    def partitioner_for(changed: Mapping[str, Any]) -> Partitioner:
        made = Partitioner(**{**changed, "lower": lower})
        made.siblings, made.watched = siblings, True
        made.join_step(gm, example_inputs)
        return made

    partition = partitioner_for({k: v for k, v in ours.items() if k != "lower"})
    if lower == "eager":
        _refuse_unknown(given)
        if given or mode is not None:
            names = ", ".join(repr(k) for k in given) or f"mode={mode!r}"
            raise ProblemError(
                f"lower='eager' does not use Inductor, but {names} is for it; known options of remat: "
                f"{', '.join(OPTIONS)}"
            )
    with at_declared_sizes(example_inputs, in_bytes=partition.in_bytes):
        if lower == "eager" or count == 1:
            try:
                if lower == "eager":
                    compiled = _compile_eager(gm, example_inputs, partition)
                else:
                    compiled = _compile_inductor(gm, example_inputs, partition, given, mode)
            except Exception as error:
                name_plain_failure(error, gm, example_inputs, lower)
                raise
        else:
            own = {k: v for k, v in ours.items() if k != "lower"}
            partition, compiled = autotune.fastest(
                gm,
                example_inputs,
                {
                    name: partitioner_for(changed)
                    for name, changed in autotune.candidates(own, count, example_inputs).items()
                },
                lambda one: _compile_inductor(gm, example_inputs, one, given, mode),
                key=json.dumps([described(own), described(given), mode, count, surroundings()]),
            )
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
    with partition.compiling(), inductor_kernels.kernels_at_end(example_inputs):
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
        """As `_compile_as_planned`; notes what it came to."""
        self._compiled, self._partition.traces = True, ""
        half = CompiledHalf.of(gm, example_inputs)
        gm = copy_module(gm)
        if self._whole and not self._halves:
            self._masks = masks_to_bytes(gm.graph, half.own)
        elif self._whole:
            example_inputs = masks_from_bytes(gm.graph, example_inputs, self._masks)
        compiled = _compile_as_planned(gm, example_inputs, **kwargs)
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


def _compile_as_planned(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one half of a step with Inductor, so that its numbers do not depend on the plan.

    Inductor rewrites what it compiles: it is a copy, since the plan shows the half as it is.

    * To lower the peak, Inductor's scheduler moves operators past one another, those that draw from
      the generator too; which ones depends on what else is in the graph. Where more than one operator
      draws, the order is kept.
      Where values go to the host, their copies begin where they were planned to.
    * Inductor lets operators write where their input lies. See `_returns_what_is_overwritten` and
      `_moves_what_is_overwritten`.
    * Inductor joins kernels that read the same value. See `remat.integrations.fusion`.
    * Inductor lays inputs of convolutions out anew. See `_keep_layouts_of_inputs`.
    * Operators that draw fill memory in its order. See `_draw_into_planned_layouts`.
    * What is drawn may be drawn again in the same half. See `_replays_within`.
    * Ends of loops of a scan run one by one. See `_scans`.
    * Some kernels write beyond a buffer, or read one too early. See `inductor_kernels.sound_kernels`.
    """
    from remat.integrations.fusion import near_fusions
    from remat.torch_compat import compile_fx_inner, inductor_config

    changes: dict[str, Any] = {}
    _draw_into_planned_layouts(gm.graph)
    if not kwargs.get("is_backward"):
        _keep_layouts_of_inputs(gm.graph)
    drawn = sum(n.op == "call_function" and ops.draws_in_order(n) for n in gm.graph.nodes)
    if drawn > 1 or any(n.target in (OFFLOAD, RELOAD) for n in gm.graph.nodes):
        changes["reorder_for_peak_memory"] = False
    if _returns_what_is_overwritten(gm.graph) or _moves_what_is_overwritten(gm.graph):
        disabled = inductor_config.disabled_passes
        changes["disabled_passes"] = ",".join(filter(None, (disabled, "reinplace_inplaceable_ops")))
    if _scans(gm.graph):
        changes[_MASKED_TAILS] = False
    fusing = near_fusions() if kwargs.get("is_backward") else contextlib.nullcontext()
    replaying = _replays_within(gm.graph)
    with (
        inductor_config.patch(changes),
        inductor_kernels.run_at_end(),
        inductor_kernels.sound_kernels(),
        replaying,
        fusing,
    ):
        return compile_fx_inner(gm, example_inputs, **kwargs)


@contextlib.contextmanager
def _replays_within(graph: fx.Graph) -> Iterator[None]:
    """Lets Inductor look at a half that repeats a draw of its own.

    On fake tensors PyTorch 2.13 to 2.15 take the generator's real state (``torch/_prims/rng_prims.py``,
    ``run_and_save_rng_state``), which they refuse where an operator is then given it.
    """
    mode: Any = torch_compat.TracingContext.get().fake_mode
    replayed = any(
        ops.is_drawn_from_state(n) and getattr(n.args[0], "op", "") == "call_function"
        for n in graph.nodes
    )
    if not replayed or mode is None or mode.allow_non_fake_inputs:
        yield
        return
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = False


def _scans(graph: fx.Graph) -> bool:
    """Whether every so-manyth element of a value is read or written by itself, as associative scans do.

    With vectorised ends of loops PyTorch 2.13 was seen to compute wrong gradients of a Mamba whose scan was made
    again. That was on one processor, and could not be found again on others.
    """
    return any(
        n.target in _STEPS and len(n.args) > _STEPS[n.target] and n.args[_STEPS[n.target]] != 1
        for n in graph.nodes
    )


def _returns_what_is_overwritten(graph: fx.Graph) -> bool:
    """Whether Inductor would return memory that it overwrites at the end of the graph.

    An input that the step updates several times is written back once, by a ``copy_`` at the end.
    PyTorch 2.13 to 2.15 let the first operator that updates it write to the input itself, as nothing
    reads that again but the ``copy_``; they do not look whether its result, which lies there then, is
    returned, for backward to read (``torch/_inductor/fx_passes/reinplace.py``, ``can_inplace``).
    """
    written_back = {
        n.args[0]: root_of(n.args[1])
        for n in graph.nodes
        if n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder"
    }
    for value in {root_of(v) for v in outputs_of(graph) if isinstance(v, fx.Node)}:
        maker: Any = value.args[0] if value.target is operator.getitem else value
        if maker.op == "call_function" and not ops.is_pointwise(maker.target):
            read = maker.all_input_nodes
            if any(p in read and last is not value for p, last in written_back.items()):
                return True
    return False


def _moves_what_is_overwritten(graph: fx.Graph) -> bool:
    """Whether Inductor would read elements of an input after it has overwritten them.

    Where the first operator that updates an input writes to the input itself (as above), and the value that
    is written back at the end has the elements of its result in other places (a roll, a transpose), PyTorch
    2.13 to 2.15 make one loop of that and of writing it back, which reads what it has just written.
    """
    for copied in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        given, last = copied.args[:2]
        if given.op != "placeholder":
            continue
        updates = {n for n in given.users if n.op == "call_function" and n is not copied}
        updates = {n for n in updates if not ops.is_pointwise(n.target)}
        todo, seen = [(last, False)], set()
        while updates and todo:
            node, moved = todo.pop()
            if (node, moved) in seen or not isinstance(node, fx.Node):
                continue
            seen.add((node, moved))
            if node in updates and moved:
                return True
            moved = moved or (node.op == "call_function" and not ops.is_pointwise(node.target))
            todo += [(n, moved) for n in node.all_input_nodes]
    return False


def _draw_into_planned_layouts(graph: fx.Graph) -> None:
    """Gives operators that draw from a state that is kept their inputs in the layout that they were traced with.

    Of the operators by which a draw is repeated (``torch/_prims/rng_prims.py``) Inductor does not know that they
    need it, as it does of PyTorch's own. In another layout the same numbers are drawn for other elements.
    """
    for node in list(graph.nodes):
        if not ops.is_drawn_from_state(node):
            continue
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dim() < 2:  # states too have no layout
                continue
            with graph.inserting_before(node):
                laid_out = graph.call_function(
                    torch_compat.force_stride_order, (given, [hint(s) for s in value.stride()])
                )
            laid_out.meta = dict(given.meta)
            node.replace_input_with(given, laid_out)


def _keep_layouts_of_inputs(graph: fx.Graph) -> None:
    """Has forward hand backward the inputs that it saves themselves, which are in memory anyway.

    Those that a convolution reads Inductor copies to another layout, and without this it is the copies that
    are kept for backward. Outputs that users see stay as they are.
    """
    meta = graph.output_node().meta
    saved = {k for k, v in enumerate(outputs_of(graph)) if getattr(v, "op", "") == "placeholder"}
    meta["user_visible_output_idxs"] = sorted({*meta.get("user_visible_output_idxs", ()), *saved})

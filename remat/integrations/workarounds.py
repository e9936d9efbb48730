"""Work around faults of PyTorch in compiled steps, with one function per fault.

Most workarounds change a graph, or change settings until a stack of context managers is closed. While Inductor compiles
a graph, `compile_graph` applies the workarounds that the installed PyTorch needs. ``tests/upstream`` has a reproducer
of each fault in plain PyTorch. A reproducer's test fails once PyTorch no longer has the fault. The first version of
PyTorch without the fault is then entered in `FIXED_IN` by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx
from torch.compiler import config as compiler_config

from remat import torch_compat
from remat.graph import ops
from remat.graph.branch_values import is_16_bits
from remat.graph.capture.tokens import CHUNK
from remat.graph.joint import outputs_of
from remat.graph.memory.host_copies import OFFLOAD, RELOAD
from remat.graph.memory.storages import hint, storage_key, tensor_bytes
from remat.graph.whole_graph import SIDE
from remat.integrations.replaced_methods import for_thread

#: Inductor's setting that vectorises the remainders of loops on a CPU; see `scalar_tails`.
_MASKED_TAILS = "cpp.enable_loop_tail_vec"
#: Operators with strided access, each with the position of its step argument.
_STEPS = {
    torch.ops.aten.slice.Tensor: 4,
    torch.ops.aten.slice_scatter.default: 5,
    torch.ops.aten.slice_backward.default: 5,
}


#: Dict from the name of a workaround's function to the first version of PyTorch without the fault. From that version on
#: the workaround is not applied.
FIXED_IN: dict[str, str] = {
    "waits_of_formed_loops": "2.14.1",
    "clones_of_written": "2.13",
    "rounded_on_cpu": "2.13",
}


def is_needed(workaround: Callable[..., Any]) -> bool:
    """Return whether the installed PyTorch has the fault that a workaround is for."""
    fixed_in = FIXED_IN.get(workaround.__name__)
    return fixed_in is None or torch_compat.is_before(fixed_in)


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a forward or backward graph with Inductor, with all needed workarounds.

    With the workarounds, the computed values do not depend on the plan.

    Args:
        gm: the graph, which the workarounds and Inductor change. The caller passes a copy, so that
            the plan keeps its graph.
        example_inputs: example inputs of the graph.
        kwargs: further arguments of Inductor's ``compile_fx_inner``, such as ``is_backward``.
    """
    with ExitStack() as stack:
        for workaround in WORKAROUNDS:
            if is_needed(workaround):
                workaround(gm.graph, bool(kwargs.get("is_backward")), stack)
        return torch_compat.compile_fx_inner(gm, example_inputs, **kwargs)


def planned_layouts_of_draws(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Make each operator that repeats a random draw receive its inputs in the memory layout that was traced."""
    # Such an operator draws again from a saved generator state (``torch/_prims/rng_prims.py``). If an input has
    # another layout than in the first draw, the same random numbers go to other elements. Inductor keeps the layout
    # of inputs of PyTorch's own random operators, but not of operators that repeat a draw.
    for node in list(graph.nodes):
        if not ops.is_drawn_from_state(node):
            continue
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            # Generator states, and other tensors with fewer than two dimensions, have only one layout.
            if not isinstance(value, torch.Tensor) or value.dim() < 2:
                continue
            _read_as_traced(node, given)


def traced_layouts_of_strided(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Make ``as_strided`` read contiguous inputs, if they were contiguous when the step was traced."""
    # ``as_strided`` reads its input's memory, whatever the order of the elements there. Inductor may save a value for
    # backward in another layout than the traced one. Results that backward computes from this value then have that
    # layout, too, and ``as_strided`` reads the wrong elements. Whether this happens depends on the saved values,
    # hence on the plan. The decomposition of a group norm contains such operators.
    strided = torch.ops.aten.as_strided.default
    for node in list(graph.find_nodes(op="call_function", target=strided)):
        given = node.args[0]
        value = given.meta.get("val")
        if not isinstance(value, torch.Tensor) or not torch_compat.is_contiguous_or_false(value):
            continue
        # `as_strided` also reads the memory around a view, which a copy of the view does not have.
        if hint(value.untyped_storage().nbytes()) == tensor_bytes(value):
            _read_as_traced(node, given)


def _read_as_traced(node: fx.Node, read: fx.Node) -> None:
    """Make a node read its input ``read`` in the memory layout that the input had during tracing."""
    with node.graph.inserting_before(node):
        laid_out = node.graph.call_function(
            torch_compat.force_stride_order, (read, [hint(s) for s in read.meta["val"].stride()])
        )
    laid_out.meta = dict(read.meta)
    node.replace_input_with(read, laid_out)


def saved_inputs_themselves(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Make forward save its own inputs instead of copies of the inputs in another layout."""
    # Inductor copies the inputs of a convolution to another layout, and would save these copies although the inputs
    # are in memory anyway. Inductor keeps the layout of graph outputs that are marked as visible to the user. This
    # function therefore marks the inputs that forward saves.
    if not is_backward:
        meta, outputs = graph.output_node().meta, outputs_of(graph)
        saved = {k for k, v in enumerate(outputs) if getattr(v, "op", "") == "placeholder"}
        seen = meta.get("user_visible_output_idxs", ())
        meta["user_visible_output_idxs"] = sorted({*seen, *saved})


def planned_order(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Make Inductor run a graph's operators in the planned order, as far as fusion allows."""
    # `near_fusions.PlannedOrder` orders the kernels, unless the user has set such a pass. Inductor's scheduler may
    # then choose another order to lower the peak, also of operators that draw random numbers. That order depends on
    # the rest of the graph, hence on the plan. This function switches the choice off if several operators draw random
    # numbers, or if some offload values.
    from remat.integrations.near_fusions import PlannedOrder

    config = torch_compat.inductor_config
    drawn = sum(n.op == "call_function" and ops.draws_in_order(n) for n in graph.nodes)
    ordered = drawn > 1 or any(n.target in (OFFLOAD, RELOAD) for n in graph.nodes)
    order: dict[str, Any] = {"reorder_for_peak_memory": False} if ordered else {}
    if any(SIDE in n.meta for n in graph.nodes):
        order["reorder_for_locality"] = False
    if getattr(config, torch_compat.POST_FUSION_PASS) is None:
        order[torch_compat.POST_FUSION_PASS] = PlannedOrder()
    stack.enter_context(config.patch(order))


def no_unsound_reinplacing(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Forbid Inductor to make operators overwrite their inputs where the results may be wrong."""
    # If the step updates an input, a ``copy_`` at the end of the graph writes the new value into the input. PyTorch
    # 2.13 to 2.15 let another operator that reads the input write its result into the input's memory, if only the
    # ``copy_`` uses the input afterwards (``torch/_inductor/fx_passes/reinplace.py``, ``can_inplace``). That is right
    # if the ``copy_`` writes back this very result. If the ``copy_`` writes back another value, there are two faults:
    # - The result may be returned for backward, and the ``copy_`` then overwrites the result.
    # - The other value may be a roll or a transpose of the result. One loop then moves and writes back elements, so
    #   that the loop reads elements that it has just written.
    # Only operators that are not pointwise, such as scatters and custom operators, can be affected, because Inductor
    # lets no others overwrite an input.
    unsound = any(
        node.op == "call_function"
        and node not in (copied, copied.args[1])
        and not ops.is_pointwise(node.target)
        for copied in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if copied.args[0].op == "placeholder"
        for node in copied.args[0].users
    )
    if unsound:
        given = torch_compat.inductor_config.disabled_passes
        disabled = ",".join(filter(None, (given, "reinplace_inplaceable_ops")))
        stack.enter_context(torch_compat.inductor_config.patch(disabled_passes=disabled))


def clones_of_written(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Make Inductor clone the tensors that a custom operator writes to, if reinplacing is off."""
    # The reinplacing pass notes which tensors need no clone. Without the note, PyTorch 2.11 and 2.12 clone none
    # (``torch/_inductor/fx_passes/post_grad.py``, ``decompose_auto_functionalized``). The pass replaces the notes
    # made here. `no_unsound_reinplacing` may switch the pass off.
    higher = torch.ops.higher_order
    for node in graph.find_nodes(op="call_function", target=higher.auto_functionalized_v2):
        node.meta["only_clone_these_tensors"] = list(range(len(node.kwargs["_all_bases"])))
    for node in graph.find_nodes(op="call_function", target=higher.auto_functionalized):
        node.meta["only_clone_these_tensors"] = torch_compat.get_mutable_args(node.args[0])[0]


def scalar_tails(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Compile the remainders of vectorised loops to scalar code, if the graph has strided access."""
    # The remainder of a loop is its last iterations, which do not fill a vector. Associative scans have strided
    # access. With vectorised remainders, PyTorch 2.13 once computed wrong gradients of a Mamba model whose scan was
    # recomputed. The fault appeared on one processor and was not reproduced on others.
    strided = any(
        n.target in _STEPS and len(n.args) > _STEPS[n.target] and n.args[_STEPS[n.target]] != 1
        for n in graph.nodes
    )
    if strided:
        stack.enter_context(torch_compat.inductor_config.patch({_MASKED_TAILS: False}))


def replays_on_fakes(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Let Inductor trace a graph that draws random numbers and later repeats a draw with the same numbers."""
    # On fake tensors, PyTorch 2.13 to 2.15 record the generator's real state (``torch/_prims/rng_prims.py``,
    # ``run_and_save_rng_state``). The operator that repeats the draw then gets a real state beside fake tensors,
    # which is an error. Therefore this function allows non-fake inputs during compilation.
    mode: Any = torch_compat.TracingContext.get().fake_mode
    replayed = any(
        ops.is_drawn_from_state(n) and getattr(n.args[0], "op", "") == "call_function"
        for n in graph.nodes
    )
    if replayed and mode is not None:
        stack.callback(setattr, mode, "allow_non_fake_inputs", mode.allow_non_fake_inputs)
        mode.allow_non_fake_inputs = True


def whole_tiles(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Make Inductor tile a kernel in one axis, if tiles in two axes would write past a row's end."""
    # A kernel may be tiled in two axes and sum over the second axis. At the end of the first axis, it may then have
    # to write less than a whole vector. To decide whether it must, PyTorch 2.13 to 2.15 inspect the loop right after
    # the first axis. If that loop is not the second axis, the decision is wrong, and a whole vector is written
    # (pytorch/pytorch issue 196681).

    def select(theirs: Callable[..., Any], self: Any, functions: Any, sizes: Any) -> Any:
        factors, axes, stats = theirs(self, functions, sizes)
        loops = len(max(sizes, key=lambda pair: len(pair[1]))[0])  # loops without a reduction
        if len(axes) == 2 and axes[0] + 1 < loops <= axes[1]:
            return factors[:1], axes[:1], stats
        return factors, axes, stats

    owner: Any = torch_compat.TilingSelect
    stack.enter_context(for_thread(owner, "select_tiling").instead(select))


def waits_of_formed_loops(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Keep a kernel's dependency on an in-place write after Inductor has rebuilt the kernel's loops."""
    # A kernel that reads a buffer must run after the operator, such as a scatter, that wrote to the buffer in place.
    # Inductor may rebuild a kernel's loops to match those of another kernel.
    # ``SchedulerNode.recompute_size_and_body`` then loses this dependency, and later passes may move the kernel ahead
    # of the write. `near_fusions.KeptWaits` keeps the dependency; a pass that the user has set runs first.
    from remat.integrations.near_fusions import KeptWaits

    config, name = torch_compat.inductor_config, torch_compat.PRE_FUSION_PASS
    theirs = getattr(config, name)
    waits: Any = KeptWaits(theirs)
    if theirs is not None and not isinstance(theirs, torch_compat.CustomSchedulerPass):
        waits = waits.__call__  # a plain function has no cache key; Inductor then caches nothing
    stack.enter_context(config.patch({name: waits}))


def sound_donation(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Let a backward graph overwrite a saved value only if no other saved value shares the memory."""
    # AOTAutograd names the saved values that backward may overwrite (donates), without comparing them with each
    # other. Inductor's code depends on these values, but the key of Inductor's cache lacks them (2.13 to 2.15). A
    # cached backward of a step that returns only the loss would otherwise overwrite the logits that another step
    # returns beside the loss. So the values become a part of the key.
    if not is_backward:
        return
    metadata: Any = torch_compat.TracingContext.get().fw_metadata
    donated = (metadata is not None and metadata.bw_donated_idxs) or []
    if donated:
        keys = [storage_key(n.meta.get("val")) for n in graph.find_nodes(op="placeholder")]
        donated = metadata.bw_donated_idxs = [i for i in donated if keys.count(keys[i]) == 1]
    tag = f"{compiler_config.cache_key_tag} donated: {donated}"
    stack.enter_context(compiler_config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]


def near_fusions(graph: fx.Graph, is_backward: bool, stack: ExitStack) -> None:
    """Apply the fusion rules of `NearFusions` to backward, to chunks of a loss, and to steps in one graph."""
    # Short reductions stay reductions, to which these rules apply. Inductor would compute a sum of fewer than eight
    # elements in each kernel that reads the sum, and keep the elements alive until then. Nothing changes if the user
    # has set fusion rules.
    theirs = torch_compat.INDUCTOR.choices
    chosen = torch_compat.inductor_config.inductor_choices_class is not None
    applies = is_backward or any(CHUNK in n.meta or SIDE in n.meta for n in graph.nodes)
    if not applies or chosen or type(theirs) is not torch_compat.InductorChoices:
        return
    from remat.integrations.near_fusions import NearFusions

    # The setting only enters Inductor's cache keys, since each thread reads it once. The handler applies the rules.
    rules = {"inductor_choices_class": NearFusions, "unroll_reductions_threshold": 1}
    stack.enter_context(torch_compat.inductor_config.patch(rules))
    stack.enter_context(torch_compat.INDUCTOR.set_choices_handler(NearFusions()))


@contextlib.contextmanager
def rounded_as_in_eager(graph: fx.Graph) -> Iterator[None]:
    """Make Inductor round each 16-bit result, whatever the result is fused with."""
    # By default, a kernel keeps a 16-bit result in 32 bits until the result is written to memory. What is written
    # depends on what is saved, so the numbers of forward would depend on the budget. Tracing marks nodes for this
    # setting, but only the traced graph shows whether it is needed. From PyTorch 2.15 on, Inductor also rounds
    # numbers in the code, which eager PyTorch does not.
    for node in graph.nodes:
        values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
        if node.op == "call_function" and any(map(is_16_bits, values)):
            node.meta["low_precision_pointwise_barrier"] = True
    with ExitStack() as stack:
        stack.enter_context(torch_compat.inductor_config.patch(emulate_precision_casts=True))
        if is_needed(rounded_on_cpu):
            stack.enter_context(rounded_on_cpu())
        yield


def rounded_on_cpu() -> AbstractContextManager[None]:
    """Make CPU kernels round as Inductor's setting ``emulate_precision_casts`` requires."""
    # PyTorch 2.11 and 2.12 cache the number before the rounding as the result of converting it back to 32 bits
    # (``torch/_inductor/codegen/cpp.py``, ``cache_dtype_convert``).
    owner: Any = torch_compat.CppKernel
    return for_thread(owner, "cache_dtype_convert").instead(lambda *_: None)


#: The workarounds that `compile_graph` applies. Those that change the graph come first, because the others inspect the
#: graph that Inductor gets.
WORKAROUNDS: tuple[Callable[[fx.Graph, bool, ExitStack], None], ...] = (
    planned_layouts_of_draws,
    traced_layouts_of_strided,
    saved_inputs_themselves,
    sound_donation,
    planned_order,
    no_unsound_reinplacing,
    clones_of_written,
    scalar_tails,
    replays_on_fakes,
    whole_tiles,
    waits_of_formed_loops,
    near_fusions,
)


def allow_keeping_the_graph(node: Any, *, by_inductor: bool) -> None:
    """Make backward overwrite copies of saved values, not the values themselves, if the autograd graph is retained."""
    # Inductor's backward overwrites some saved values. Without remat, PyTorch compiles backward when backward first
    # runs, and allows overwriting only if that run does not retain the autograd graph. With remat, backward is
    # compiled before forward first runs, before it is known whether the autograd graph will be retained.
    owner = torch_compat.autograd_function(node)
    overwritten = list(getattr(getattr(owner, "metadata", None), "bw_donated_idxs", None) or ())
    if owner is None or not overwritten:
        return
    if by_inductor:
        backward = getattr(owner, "compiled_bw", None)
        backward = torch_compat.innermost_fn(backward) if callable(backward) else None
        code = getattr(backward, "current_callable", None)
        if code is None:
            return

        def run(arguments: list[Any]) -> Any:
            if torch_compat.keeps_graph():
                for k in overwritten:
                    arguments[k] = _copied(arguments[k])
            return code(arguments)

        backward.current_callable = run  # type: ignore[union-attr]
    # Otherwise PyTorch would raise an error for a retained graph, although `run` copies these values.
    owner.metadata.bw_donated_idxs = []


def _copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same strides."""
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)

"""Faults of PyTorch that compiled steps are not to show, each worked around by one function.

`compile_graph` compiles a forward or backward graph with all workarounds that this PyTorch needs. Everything that replaces a method
of PyTorch, or writes to what PyTorch keeps to itself, stands in this file. ``tests/upstream`` has a reproducer of each
fault in plain PyTorch, which fails once PyTorch is without it. `FIXED_IN` then says so.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.host_copies import OFFLOAD, RELOAD
from remat.graph.joint import outputs_of
from remat.graph.storages import hint
from remat.graph.writes import root_of

#: Inductor's vectorised ends of loops on a CPU. See `scalar_tails`.
_MASKED_TAILS = "cpp.enable_loop_tail_vec"
#: Operators that take a step between the elements that they access, and where their arguments say so.
_STEPS = {
    torch.ops.aten.slice.Tensor: 4,
    torch.ops.aten.slice_scatter.default: 5,
    torch.ops.aten.slice_backward.default: 5,
}


#: The first version of PyTorch without a fault, by the name of the function that works around it. From that version on
#: the function is not applied.
FIXED_IN: dict[str, str] = {"waits_of_formed_loops": "2.15"}


def is_needed(workaround: Callable[..., Any]) -> bool:
    """Whether this PyTorch has the fault that the given function works around."""
    fixed_in = FIXED_IN.get(workaround.__name__)
    return fixed_in is None or torch_compat.is_before(fixed_in)


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile one half of a step with Inductor, so that its numbers do not depend on the plan.

    Inductor rewrites what it compiles, so ``gm`` is a copy: the plan shows the half as it is.
    """
    with contextlib.ExitStack() as stack:
        for workaround in WORKAROUNDS:
            if is_needed(workaround):
                stack.enter_context(workaround(gm.graph, bool(kwargs.get("is_backward"))))
        return torch_compat.compile_fx_inner(gm, example_inputs, **kwargs)


@contextlib.contextmanager
def planned_layouts_of_draws(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Give operators that draw from a kept state their inputs in the layout that they were traced with.

    Inductor does not know that the operators that repeat a draw (``torch/_prims/rng_prims.py``) need it, as it does
    of PyTorch's own. In another layout the same numbers are drawn for other elements.
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
    yield


@contextlib.contextmanager
def saved_inputs_themselves(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Have forward hand backward the inputs that it saves themselves, which are in memory anyway.

    Inductor copies the inputs of a convolution to another layout, and would keep these copies for backward.
    Outputs that users see stay as they are.
    """
    if not is_backward:
        meta, outputs = graph.output_node().meta, outputs_of(graph)
        saved = {k for k, v in enumerate(outputs) if getattr(v, "op", "") == "placeholder"}
        seen = meta.get("user_visible_output_idxs", ())
        meta["user_visible_output_idxs"] = sorted({*seen, *saved})
    yield


@contextlib.contextmanager
def planned_order_of_draws(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Keep the order of operators, if more than one draws from the generator or values go to the host.

    To lower the peak, Inductor's scheduler moves operators past one another, those that draw too. Which ones it
    moves depends on what else is in the graph.
    """
    drawn = sum(n.op == "call_function" and ops.draws_in_order(n) for n in graph.nodes)
    ordered = drawn > 1 or any(n.target in (OFFLOAD, RELOAD) for n in graph.nodes)
    with torch_compat.inductor_config.patch({"reorder_for_peak_memory": False} if ordered else {}):
        yield


@contextlib.contextmanager
def no_unsound_reinplacing(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Keep operators from writing where their input lies, if that is returned or read in other places.

    See `_returns_what_is_overwritten` and `_moves_what_is_overwritten`.
    """
    unsound = _returns_what_is_overwritten(graph) or _moves_what_is_overwritten(graph)
    disabled = filter(
        None, (torch_compat.inductor_config.disabled_passes, "reinplace_inplaceable_ops")
    )
    with torch_compat.inductor_config.patch(
        {"disabled_passes": ",".join(disabled)} if unsound else {}
    ):
        yield


@contextlib.contextmanager
def scalar_tails(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Run the ends of loops element by element, if values are accessed with a step, as associative scans do.

    With vectorised ends of loops PyTorch 2.13 was seen to compute wrong gradients of a Mamba whose scan was made
    again. That was on one processor, and could not be found again on others.
    """
    strided = any(
        n.target in _STEPS and len(n.args) > _STEPS[n.target] and n.args[_STEPS[n.target]] != 1
        for n in graph.nodes
    )
    with torch_compat.inductor_config.patch({_MASKED_TAILS: False} if strided else {}):
        yield


@contextlib.contextmanager
def replays_on_fakes(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Let Inductor trace a half that repeats a draw of its own.

    On fake tensors PyTorch 2.13 to 2.15 take the generator's real state (``torch/_prims/rng_prims.py``,
    ``run_and_save_rng_state``). They refuse that state if an operator is then given it.
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


@contextlib.contextmanager
def whole_tiles(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Tile kernels in one axis that would else write beyond a row, or beyond the buffer.

    If a kernel is tiled in two axes, the second of which is summed over, PyTorch 2.13 to 2.15 look at the loop behind
    the first axis to see whether the end of that axis needs a shorter write. With a third loop between both, the
    write is a whole vector (pytorch/pytorch issue 196681).
    """

    def select(theirs: Callable[..., Any], self: Any, functions: Any, sizes: Any) -> Any:
        factors, axes, stats = theirs(self, functions, sizes)
        loops = len(max(sizes, key=lambda pair: len(pair[1]))[0])  # those that are not summed over
        if len(axes) == 2 and axes[0] + 1 < loops <= axes[1]:
            return factors[:1], axes[:1], stats
        return factors, axes, stats

    owner: Any = torch_compat.TilingSelect
    with _for_thread(owner, "select_tiling").instead(select):
        yield


@contextlib.contextmanager
def waits_of_formed_loops(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Have a kernel wait for the operator that writes what it reads, after its loops were formed anew.

    A kernel that reads a buffer which an operator has written to (a scatter) waits for that operator. If Inductor
    forms its loops anew to fit those of another kernel, ``SchedulerNode.recompute_size_and_body`` forgets that, and
    whatever moves kernels afterwards may move it ahead.
    """

    def form(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    owner: Any = torch_compat.SchedulerNode
    with _for_thread(owner, "recompute_size_and_body").instead(form):
        yield


@contextlib.contextmanager
def near_fusions(graph: fx.Graph, is_backward: bool) -> Iterator[None]:
    """Have Inductor fuse kernels of backward as `near_fusions.NearFusions` does; choices of the user's own stay."""
    theirs = torch_compat.INDUCTOR.choices
    chosen = torch_compat.inductor_config.inductor_choices_class is not None
    if not is_backward or chosen or type(theirs) is not torch_compat.InductorChoices:
        yield
        return
    from remat.integrations.near_fusions import NearFusions

    # The setting is in the keys of the caches; the handler is what decides, as a thread reads the setting once.
    with (
        torch_compat.inductor_config.patch(inductor_choices_class=NearFusions),
        torch_compat.INDUCTOR.set_choices_handler(NearFusions()),
    ):
        yield


#: What `compile_graph` applies; edits of the graph come first, as the others look at the graph that Inductor gets.
WORKAROUNDS: tuple[Callable[[fx.Graph, bool], AbstractContextManager[None]], ...] = (
    planned_layouts_of_draws,
    saved_inputs_themselves,
    planned_order_of_draws,
    no_unsound_reinplacing,
    scalar_tails,
    replays_on_fakes,
    whole_tiles,
    waits_of_formed_loops,
    near_fusions,
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


class _ForThread:
    """A PyTorch method that each thread may replace for itself, patched while any thread does."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._lock, self._inside = threading.Lock(), 0
        self._own = threading.local()

    @contextlib.contextmanager
    def instead(self, replacement: Callable[..., Any]) -> Iterator[None]:
        """Make this thread call another function instead; it gets the original method before the arguments."""
        with self._lock:
            if not self._inside:
                self._theirs = theirs = getattr(self._owner, self._name)

                def call(*args: Any, **kwargs: Any) -> Any:
                    own = getattr(self._own, "called", None)
                    return theirs(*args, **kwargs) if own is None else own(theirs, *args, **kwargs)

                setattr(self._owner, self._name, call)
            self._inside += 1
        outer = getattr(self._own, "called", None)
        self._own.called = replacement
        try:
            yield
        finally:
            self._own.called = outer
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    setattr(self._owner, self._name, self._theirs)


_for_thread = functools.cache(_ForThread)


def masks_to_bytes(graph: fx.Graph, own: int) -> frozenset[str]:
    """Have forward return its masks as bytes of 0 and 1; returns the names of those.

    PyTorch 2.13 to 2.15 do not vectorise reading and writing of booleans in memory on a CPU: a relu of two million
    elements that also writes its mask took 20 ms instead of 0.5 ms. As ``uint8``, converted by way of ``float32``, the
    same mask costs nothing one could measure, and it takes as many bytes.

    Args:
        graph: forward; it is changed.
        own: how many of its outputs are the step's own, which stay as they are.
    """
    if not is_needed(masks_to_bytes):
        return frozenset()
    returned = outputs_of(graph)
    kept = {v for v in returned[:own] if isinstance(v, fx.Node)}
    masks = dict.fromkeys(
        v for v in returned[own:] if isinstance(v, fx.Node) and v not in kept and _is_mask(v)
    )
    output = graph.output_node()
    for mask in masks:
        with graph.inserting_before(output):
            packed = _converted(graph, _converted(graph, mask, torch.float32), torch.uint8)
        output.replace_input_with(mask, packed)
    return frozenset(m.name for m in masks)


def masks_from_bytes(graph: fx.Graph, inputs: Sequence[Any], names: Iterable[str]) -> Sequence[Any]:
    """Have backward take masks as bytes; returns what it is compiled for then.

    Args:
        graph: backward; it is changed.
        inputs: what it is compiled for.
        names: the masks, as `masks_to_bytes` returned them.
    """
    wanted, given = frozenset(names), list(inputs)
    for k, node in enumerate(graph.find_nodes(op="placeholder")):
        if node.name not in wanted:
            continue
        users = list(node.users)
        node.meta["val"] = node.meta["val"].to(torch.uint8)
        given[k] = given[k].to(torch.uint8)
        with graph.inserting_after(_last_placeholder(graph)):
            real = _converted(graph, node, torch.float32)
        with graph.inserting_after(real):
            mask = graph.call_function(torch.ops.aten.ne.Scalar, (real, 0.0))
        mask.meta = {**node.meta, "val": real.meta["val"].to(torch.bool)}
        for user in users:
            user.replace_input_with(node, mask)
    return given


def _is_mask(node: fx.Node) -> bool:
    """Whether a value is a boolean CPU tensor with its own storage, made by a fusible operator."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dtype is torch.bool
        and value.device.type == "cpu"
        and ops.is_pointwise(node.target)
    )


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    made: fx.Node = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    made.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return made


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    *_, last = graph.find_nodes(op="placeholder")
    return last  # type: ignore[no-any-return]


def allow_keeping_the_graph(step: Any, *, by_inductor: bool) -> None:
    """Have a backward that keeps the graph overwrite copies of what was saved.

    Inductor's backward overwrites some of what was saved. PyTorch lets it if the first backward does not keep the
    graph, and compiles backward only then. Ours is compiled before forward runs, when nobody knows that yet.

    Args:
        step: the node of autograd's graph that differentiates the step.
        by_inductor: whether Inductor compiled it; halves that run as they are overwrite nothing.
    """
    owner = torch_compat.autograd_function(step)
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
    owner.metadata.bw_donated_idxs = []


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides as the tensor."""
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)

"""Capture a model's training step as joint graphs, without allocating any weight.

Dynamo traces the model on fake tensors. AOTAutograd then traces forward and backward, with or
without Inductor's passes. The result is the graph that ``torch.compile`` hands to a partitioner.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import fx

from remat import torch_compat
from remat.errors import CaptureError
from remat.graph.capture.calling import read_call, why_no_instance, why_not_callable
from remat.graph.capture.errors import CapturedError, explain, takes_lock
from remat.graph.capture.fakes_of_models import as_fakes
from remat.graph.capture.regions import is_region, split_region
from remat.graph.capture.tangents import layouts_of_tangents
from remat.graph.joint import JointGraph
from remat.graph.memory.storages import tensors_of
from remat.graph.problems.step_runs import StepRuns

LOWERINGS = ("inductor", "eager")


@overload
def capture(
    model: Callable[..., Any],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    lower: str = ...,
    device: str | torch.device | None = ...,
    fullgraph: Literal[True] = ...,
    dynamic: bool | None = ...,
) -> JointGraph: ...
@overload
def capture(
    model: Callable[..., Any],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    lower: str = ...,
    device: str | torch.device | None = ...,
    fullgraph: Literal[False],
    dynamic: bool | None = ...,
    run: bool = ...,
) -> list[JointGraph]: ...
def capture(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    lower: str = "inductor",
    device: str | torch.device | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = False,
    run: bool = False,
) -> JointGraph | list[JointGraph]:
    """Trace forward and backward of ``model(*args, **kwargs)`` as a joint graph.

    Weights may be real, on the meta device, or fake. No weight is copied or allocated. The model
    stays unchanged, with one exception: if ``run`` is set, writes of forward to parameters persist.
    The model's mode (train or eval) is respected. Dynamo cannot trace code that acquires a lock,
    for example in a one-time setup. A model that acquires a lock is called once without tracing,
    and then captured.

    Args:
        model: a module or a function; its outputs may be any pytree.
        args: positional arguments: real, meta or fake tensors, or other values.
        kwargs: keyword arguments, of the same kinds.
        lower: ``"inductor"`` (Inductor's decompositions and joint-graph passes) or ``"eager"``
            (neither of the two).
        device: trace as if all tensors were on this device. None keeps each tensor's own device,
            but moves tensors from the meta device to the CPU.
        fullgraph: if True, a graph break is an error. If False, return all graphs in a list.
        dynamic: as in `torch.compile`; False (static shapes) by default.
        run: run forward on real tensors, so that branches on the values of tensors can be followed,
            such as ``if x.sum() > 0:``. Requires ``fullgraph=False``. Inputs and buffers are copied
            first, and the states of the default generators are restored. No tensor is saved for
            backward, so only the activations of one graph are alive at a time.

    Returns:
        One joint graph. With ``fullgraph=False``, a list of joint graphs in the order of capture.

    Raises:
        CaptureError: ``model`` is a class or not callable, ``args`` not a sequence, ``kwargs`` not
            a dict, or the model does not accept the arguments. Also for a graph break under
            ``fullgraph=True`` (the message names the source line), an unknown ``lower``, or a
            device that this build of PyTorch cannot fake. Also if nothing can be differentiated, or
            if the model raises or cannot be copied. Also if ``run`` is combined with
            ``fullgraph=True``, with a device, or with tensors that are fake or on the meta device.
    """
    torch_compat.check_version()
    if lower not in LOWERINGS:
        raise CaptureError(f"lower is {lower!r}; expected one of {', '.join(map(repr, LOWERINGS))}")
    # Compiling a class would change the class for the whole process.
    if no_instance := why_no_instance(model):
        raise CaptureError(no_instance)
    if not callable(model):
        raise CaptureError(f"model is a {type(model).__name__}; expected a module or a function")
    args, kwargs = read_call(args, kwargs)
    name = getattr(model, "__name__", type(model).__name__)
    sink: list[JointGraph] = []
    backend = _Backend(sink, lower, name, stop=fullgraph, run=run)
    faked = as_fakes(model, args, kwargs, fullgraph=fullgraph, device=device, run=run)
    with faked as (fake_model, fake_args, fake_kwargs):
        compiled = torch.compile(fake_model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
        try:
            try:
                backend.finish(compiled(*fake_args, **fake_kwargs))
            except Exception as error:
                if not takes_lock(error):
                    raise
                # The lock may guard a one-time setup, which this call completes outside of Dynamo.
                with contextlib.suppress(Exception):  # other errors appear in the second capture
                    fake_model(*fake_args, **fake_kwargs)
                backend.finish(compiled(*fake_args, **fake_kwargs))
        except Exception as error:

            def plainly() -> Any:
                alone = torch.compile(
                    fake_model, backend="aot_eager", fullgraph=fullgraph, dynamic=dynamic
                )
                return alone(*fake_args, **fake_kwargs)

            not_callable = why_not_callable(model, args, kwargs)
            explain(error, name, sink, fullgraph, not_callable, None if run else plainly)
    if not sink:
        raise CaptureError(
            f"'{name}' has nothing to differentiate: no output depends on a parameter or input that "
            "requires a gradient (is it in torch.no_grad or frozen, or does it call backward itself?)"
            + ("" if fullgraph else "; nor is it compiled where a graph breaks inside of a loop")
        )
    return sink[0] if fullgraph else sink


def _dropped(_: torch.Tensor) -> None:
    """Pack hook for `saved_tensors_hooks` that drops the tensor, because no backward runs."""


def _never(_: Any) -> torch.Tensor:
    """Unpack hook for `saved_tensors_hooks` that raises, because a capture runs no backward."""
    raise AssertionError("a capture does not run backward")


class _Backend:
    """Dynamo backend that records joint graphs in ``sink``.

    With ``stop``, the first joint graph ends the compilation. With ``run``, the graphs run on real tensors.
    """

    def __init__(
        self, sink: list[JointGraph], lower: str, name: str, *, stop: bool, run: bool
    ) -> None:
        self._is_real = run
        self._sink = sink
        self._lower = lower
        self._name = name
        self._stop = stop
        self._runs = StepRuns()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = len(self._sink)
        with torch_compat.functorch_config.patch(layouts_of_tangents(module.graph)):
            compiled = self._compiled(module, inputs)
        if self._stop or len(self._sink) == before:
            return compiled
        return self._recording(compiled, len(self._sink) - 1)

    def _recording(self, compiled: Callable[..., Any], graph: int) -> Callable[..., Any]:
        """Return a callable that runs a compiled graph, and records each run with its arguments and outputs."""

        def run(*args: Any) -> Any:
            # No backward follows, so saved activations would only take memory.
            nothing_kept = torch.autograd.graph.saved_tensors_hooks(_dropped, _never)
            with nothing_kept if self._is_real else contextlib.nullcontext():
                out = compiled(*args)
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            self._runs.add(graph, self._sink[graph], args, outputs)
            return out

        return run

    def finish(self, result: Any) -> None:
        """Record how often each joint graph ran in the compiled model, and the values exchanged between graphs."""
        self._sink[:] = self._runs.joints(self._sink, tensors_of(result))

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._lower == "inductor":
            patches = {
                "custom_partitioner_fn": _partitioner_of(self._take),
                # A cache hit would skip the partitioner, and no joint graph would be recorded.
                "force_disable_caches": True,
            }
            compiled: Any = torch_compat.compile_fx(
                module, inputs, inner_compile=self._run_uncompiled, config_patches=patches
            )
            return compiled  # type: ignore[no-any-return]
        backend = torch_compat.aot_autograd(
            fw_compiler=self._run_uncompiled,
            inference_compiler=self._run_uncompiled,
            partition_fn=self._take,
            keep_inference_input_mutations=True,
        )
        return backend(module, inputs)

    def _take(
        self,
        module: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Record a joint graph, then partition it into forward and backward so that the step can run."""
        # AOTAutograd hands over the joint graph of a nested compile region before the joint graph that calls
        # the region. Only the joint graph that calls regions is recorded.
        if is_region(module, joint_inputs):
            return split_region(module, num_fwd_outputs=num_fwd_outputs)
        joint = JointGraph(
            graph_module=module,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=tuple(static_lifetime_input_indices or ()),
            lower=self._lower,
            name=self._name if self._stop else f"{self._name}[{len(self._sink)}]",
        )
        self._sink.append(joint)
        if self._stop:
            raise CapturedError
        copy = joint.copy()
        _read_first_results(copy.graph)
        return torch_compat.default_partition(
            copy.graph_module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )

    def _run_uncompiled(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        """Return a function that runs a graph uncompiled, because a capture needs no speed."""
        if self._stop:
            raise CapturedError
        return torch_compat.make_boxed_func(module.forward)


def _read_first_results(graph: fx.Graph) -> None:
    """Add a ``getitem`` node for the first result of each call that returns a tuple which no node reads."""
    for node in list(graph.nodes):
        values = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(values, (tuple, list)):
            # PyTorch's partitioner drops a call that returns a tuple which no node reads. The call may be a random
            # operator, which must stay in the graph.
            with graph.inserting_after(node):
                first = graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": values[0]}


def _partitioner_of(take: Callable[..., Any]) -> Any:
    """Return a custom partitioner for Inductor that calls ``take`` with each joint graph."""

    # Importing the base class imports Inductor, which is slow.
    class Partitioner(torch_compat.CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return take(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    return Partitioner()

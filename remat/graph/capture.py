"""Capturing a model's training step as joint graphs, without allocating a weight.

Dynamo traces the model under fake tensors and AOTAutograd traces forward and backward, under the
chosen lowering: what is captured is what a partitioner is handed when the model is compiled.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import fx

from remat import torch_compat
from remat.errors import CaptureError
from remat.graph.calling import read_call, why_no_instance, why_not_callable
from remat.graph.capture_errors import CapturedError, NothingToDifferentiateError, explain
from remat.graph.fake_devices import fakeable
from remat.graph.joint import JointGraph, Role, role_of
from remat.graph.regions import is_region, split_region
from remat.torch_compat import pytree

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
    """Traces forward and backward of ``model(*args, **kwargs)``.

    Weights may be real, on the meta device, or fake; none is copied or allocated, and the model is
    left as it was. The mode of the model (train or eval) is respected.

    Args:
        model: a module or a function; its outputs may be any pytree.
        args: positional arguments: real, meta or fake tensors, or anything else.
        kwargs: keyword arguments likewise.
        lower: ``"inductor"`` (Inductor's decompositions and joint-graph passes) or ``"eager"``
            (none).
        device: trace as if everything lay on this device; where None, on the device of the
            tensors, the CPU for those on the meta device.
        fullgraph: a graph break is an error; with False, all graphs are returned in a list.
        dynamic: as in `torch.compile`; static shapes by default.
        run: run forward on the real numbers of ``args`` and of the model, and so take the branches
            that depend on numbers as they go: ``if x.sum() > 0:``, ``x.item()``. Only with
            ``fullgraph=False``. Inputs and buffers are copied first; nothing is kept for backward, so
            that at most the activations of one graph are alive at a time; the generator is left as it
            was. (What forward itself writes to parameters stays.)

    Raises:
        CaptureError: a class instead of an instance, arguments that are no tuple and dict, or that the model does not take; a graph
            break (the message names the source line), an unknown lowering, a device that this build
            of PyTorch cannot fake, nothing to differentiate, an error in the model itself, or, with
            ``run``, a tensor without numbers.
    """
    torch_compat.check_version()
    if lower not in LOWERINGS:
        raise CaptureError(f"lower is {lower!r}; expected one of {', '.join(map(repr, LOWERINGS))}")
    if no_instance := why_no_instance(model):  # compiled, a class is changed for the whole process
        raise CaptureError(no_instance)
    if not callable(model):
        raise CaptureError(f"model is a {type(model).__name__}; expected a module or a function")
    args, kwargs = read_call(args, kwargs)
    name = getattr(model, "__name__", type(model).__name__)
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tensors = _tensors_of(model, args, kwargs)
    if run:
        _check_numbers(name, tensors, fullgraph, device)
    mode: Any = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
    if mode is None:
        mode = torch_compat.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    target = None if device is None else fakeable(device)
    faked = _Copied() if run else _Faker(mode, target)
    sink: list[JointGraph] = []
    backend = _Backend(sink, lower, name, stop=fullgraph, run=run)
    # A run leaves the generators of all devices as they were.
    with _quiet_dynamo(), torch.random.fork_rng() if run else mode:
        fake_args, fake_kwargs = pytree.tree_map(faked, (args, kwargs))
        fake_model = faked.module(model)
        compiled = torch.compile(fake_model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
        try:
            backend.note_returned(compiled(*fake_args, **fake_kwargs))
        except Exception as error:
            explain(error, name, sink, fullgraph, why_not_callable(model, args, kwargs))
    if not sink:
        raise CaptureError(
            f"'{name}' has nothing to differentiate: no output depends on a parameter or input that "
            "requires a gradient (is it in torch.no_grad, or frozen?)"
            + ("" if fullgraph else "; nor is it compiled where a graph breaks inside of a loop")
        )
    return sink[0] if fullgraph else sink


class _Faker:
    """Turns tensors and modules into fake ones, each tensor once."""

    def __init__(self, mode: Any, device: torch.device | None) -> None:
        self._mode = mode
        self._device = device
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # ids are only good while their objects live

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._memo:
            self._kept.append(value)
            self._memo[id(value)] = self._fake(value)
        return self._memo[id(value)]

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        if hasattr(value, "fake_mode"):
            device = self._device or value.device
            if device == value.device:
                return value
        else:
            device = self._device or (
                torch.device("cpu") if value.device.type == "meta" else value.device
            )
        with self._mode, torch.no_grad():
            if device == value.device:
                fake = self._mode.from_tensor(value, static_shapes=True)
            else:
                fake = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=value.requires_grad)
        if fake.requires_grad != value.requires_grad and fake.is_leaf:
            fake.requires_grad_(value.requires_grad)
        return fake  # type: ignore[no-any-return]

    def module(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The module over fake tensors: its structure is copied, its weights never are."""
        if not isinstance(model, torch.nn.Module):
            return model
        memo: dict[int, Any] = {}
        for module in model.modules():
            for tensors in (
                torch_compat.parameters_of(module),
                torch_compat.buffers_of(module),
                module.__dict__,
            ):
                for tensor in tensors.values():
                    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or hasattr(
                        tensor, "fake_mode"
                    ):
                        memo[id(tensor)] = self(tensor)
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise CaptureError(
                f"'{type(model).__name__}' cannot be copied to trace it without its weights "
                f"({type(error).__name__}: {error}); build it under torch.device('meta')"
            ) from error


class _Copied(_Faker):
    """Copies what a run may overwrite: inputs and buffers. Parameters are the model's own."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.nn.Parameter):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)


def _check_numbers(
    name: str, tensors: Sequence[torch.Tensor], fullgraph: bool, device: Any
) -> None:
    """Refuses a run that cannot be one."""
    if fullgraph:
        raise CaptureError(
            f"'{name}' is to be captured as one graph, in which no branch is taken from a run: pass "
            "fullgraph=False with run=True"
        )
    if device is not None:
        raise CaptureError(
            f"device is {str(device)!r}, but run=True runs the model where it lies; move the model and "
            "its inputs there instead"
        )
    empty = [t for t in tensors if hasattr(t, "fake_mode") or t.device.type == "meta"]
    if empty:
        raise CaptureError(
            f"'{name}' cannot be run: {len(empty)} of its {len(tensors)} tensors have no numbers (meta "
            "or fake). Build the model and its inputs for real, or capture without run=True"
        )


def _dropped(_: torch.Tensor) -> None:
    """Packs what autograd saves: nothing is kept, as nothing runs backward."""


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("a capture does not run backward")


class _Backend:
    """The Dynamo backend that records joint graphs."""

    def __init__(
        self, sink: list[JointGraph], lower: str, name: str, *, stop: bool, run: bool = False
    ) -> None:
        self._really = run
        self._sink = sink
        self._lower = lower
        self._name = name
        self._stop = stop
        self._made: dict[int, tuple[int, int]] = {}  # by id: which graph's which output
        self._given: dict[int, tuple[int, int]] = {}  # by id: which graph's which input, at first
        self._kept: list[Any] = []  # ids are only good while their objects live

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = len(self._sink)
        compiled = self._compiled(module, inputs)
        if self._stop or len(self._sink) == before:
            return compiled
        return self._noting_inputs(compiled, len(self._sink) - 1)

    def _noting_inputs(self, compiled: Callable[..., Any], graph: int) -> Callable[..., Any]:
        """Notes at the first call which inputs are outputs of earlier graphs, or inputs of theirs."""

        runs = 0

        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 1:
                self._sink[graph] = replace(self._sink[graph], runs=runs)
            received = [(i, *self._made[id(a)]) for i, a in enumerate(args) if id(a) in self._made]
            shared = [(i, *self._given[id(a)]) for i, a in enumerate(args) if id(a) in self._given]
            joint = self._sink[graph]
            primals = sum(
                n.op == "placeholder" and role_of(n) is Role.PRIMAL for n in joint.graph.nodes
            )
            if (received or shared) and runs == 1 and primals == len(args):
                self._sink[graph] = replace(joint, received=tuple(received), shared=tuple(shared))
            for i, value in enumerate(args):
                if isinstance(value, torch.Tensor) and id(value) not in self._made:
                    self._given.setdefault(id(value), (graph, i))
                    self._kept.append(value)
            nothing_kept = torch.autograd.graph.saved_tensors_hooks(_dropped, _never)
            with nothing_kept if self._really else contextlib.nullcontext():
                out = compiled(*args)
            for k, value in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
                if isinstance(value, torch.Tensor):
                    self._made[id(value)] = (graph, k)
                    self._kept.append(value)
            return out

        return run

    def note_returned(self, result: Any) -> None:
        """Notes which outputs of graphs the step returns that later graphs receive."""
        received = {(j, k) for joint in self._sink for _, j, k in joint.received}
        leaves = pytree.tree_leaves(result)
        found = {self._made[id(v)] for v in leaves if id(v) in self._made}
        for graph, output in sorted(found & received):
            joint = self._sink[graph]
            self._sink[graph] = replace(joint, returned=(*joint.returned, output))

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._lower == "inductor":
            patches = {
                "custom_partitioner_fn": _partitioner_of(self._take),
                "force_disable_caches": True,
            }
            compiled: Any = torch_compat.compile_fx(
                module, inputs, inner_compile=self._run_as_it_is, config_patches=patches
            )
            return compiled  # type: ignore[no-any-return]
        backend = torch_compat.aot_autograd(
            fw_compiler=self._run_as_it_is,
            inference_compiler=self._run_as_it_is,
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
        return torch_compat.default_partition(
            joint.copy().graph_module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )

    def _run_as_it_is(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        """Runs a graph on fake tensors: a capture computes shapes, no numbers."""
        if self._stop:
            raise NothingToDifferentiateError
        return torch_compat.make_boxed_func(module.forward)


def _partitioner_of(take: Callable[..., Any]) -> Any:
    """A custom partitioner around a function; its class is made late, as Inductor is slow to import."""

    class Partitioner(torch_compat.CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return take(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    return Partitioner()


@contextlib.contextmanager
def _quiet_dynamo() -> Iterator[None]:
    """Captures do not count as recompilations, and what a model logs is no graph break."""
    config = torch_compat.dynamo_config
    names = ("debug", "info", "warning", "warning_once")
    loggers = {getattr(logging.Logger, n) for n in names if hasattr(logging.Logger, n)}
    with (
        warnings.catch_warnings(),
        _without_traces_of_operators(),
        config.patch(
            recompile_limit=1_000_000,
            accumulated_recompile_limit=1_000_000,
            suppress_errors=False,
            ignore_logging_functions={*config.ignore_logging_functions, *loggers},
        ),
    ):
        # Dynamo looks at .grad of what one graph hands to the next.
        warnings.filterwarnings(
            "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
        )
        yield


@contextlib.contextmanager
def _without_traces_of_operators() -> Iterator[None]:
    """An operator that refuses its arguments is told in our error; the log of it only hides that."""
    log = logging.getLogger(torch_compat.FakeTensorMode.__module__)

    def other(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR or "run meta for" not in str(record.msg)

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


def _tensors_of(model: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        found += [*model.parameters(), *model.buffers()]
    return found

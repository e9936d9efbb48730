"""Convert a model and its arguments to fake tensors for Dynamo, without copying any weight."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from remat import torch_compat
from remat.errors import CaptureError, first_line
from remat.graph.collection import paused_collection
from remat.graph.memory.storages import fake_mode_of, tensors_of
from remat.torch_compat import pytree

#: A model with its positional and keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def as_fakes(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fullgraph: bool,
    device: str | torch.device | None,
    run: bool,
) -> Iterator[Call]:
    """Yield the model and its arguments with fake tensors, for tracing inside of a ``with`` block.

    With ``run``, the model and its arguments have real tensors instead of fake ones.

    Args:
        model: a module or a function.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        fullgraph: whether a single graph is required; not allowed with ``run``.
        device: device of all fake tensors. None keeps each tensor's own device, but moves tensors
            from the meta device to the CPU.
        run: whether forward runs on real tensors instead of fake ones.

    Raises:
        CaptureError: ``run`` is combined with ``fullgraph``, a device, or tensors that are fake or
            on the meta device. Also if the device cannot be faked or the model cannot be copied.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    name = getattr(model, "__name__", type(model).__name__)
    tensors = tensors_of((args, kwargs))
    if isinstance(model, torch.nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    if run:
        _check_numbers(name, tensors, fullgraph, device)
    mode = fake_mode_of(tensors)
    if mode is None:
        mode = torch_compat.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    target = None if device is None else fakeable(device)
    faked = Copied() if run else Faker(mode, target)
    # A run on real tensors must not change the states of the default generators, on any device.
    with (
        _quiet_dynamo(),
        # With real tensors, cyclic garbage may hold activations, so collection must go on.
        contextlib.nullcontext() if run else paused_collection(),
        torch.random.fork_rng() if run else mode,
    ):
        fake_args, fake_kwargs = pytree.tree_map(faked, (args, kwargs))
        yield faked.module(model), fake_args, fake_kwargs


class Faker:
    """Callable that converts a tensor to a fake tensor, and returns any other value unchanged.

    Converting the same tensor again returns the same fake tensor.
    """

    def __init__(self, mode: Any, device: torch.device | None) -> None:
        self._mode = mode
        self._device = device
        self._memo: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value not in self._memo:
            self._memo[value] = self._fake(value)
            # If the user marked sizes with `mark_dynamic`, `torch.compile` traces them as symbols. The capture
            # must do the same.
            torch_compat.mark_alike(self._memo[value], value)
        return self._memo[value]

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
                # Static shapes, because Dynamo itself creates the symbols of marked sizes.
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
        """Return a copy of a module with fake weights; return any other callable unchanged.

        Raises:
            CaptureError: the module cannot be deep-copied.
        """
        if not isinstance(model, torch.nn.Module):
            return model
        held = (
            x
            for m in model.modules()
            for slots in (torch_compat.parameters_of(m), torch_compat.buffers_of(m), vars(m))
            for x in slots.values()
        )
        # `deepcopy` finds the fake tensors in its memo instead of copying the weights.
        memo: dict[int, Any] = {
            id(x): self(x)
            for x in held
            if type(x) in (torch.Tensor, torch.nn.Parameter) or hasattr(x, "fake_mode")
        }
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise CaptureError(
                f"'{type(model).__name__}' cannot be copied to trace it without its weights "
                f"({type(error).__name__}: {error}); build it under torch.device('meta')"
            ) from error


class Copied(Faker):
    """Callable that copies inputs and buffers, because a run on real tensors may overwrite them.

    Parameters are returned unchanged. Copies of leaf tensors share a storage if the leaf tensors do.
    """

    def __init__(self) -> None:
        super().__init__(None, None)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.nn.Parameter):
            return value
        if value.is_leaf:
            return self._leaf(value.detach()).requires_grad_(value.requires_grad)
        # Like ``value``, the copy must not be a leaf: PyTorch refuses in-place writes to leaves that require a
        # gradient.
        with torch.enable_grad():
            return value.detach().requires_grad_().clone()

    def _leaf(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a leaf tensor, with the same offset and strides in a copy of its storage."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return value.clone()
        storage = value.untyped_storage()
        key = torch_compat.storage_id(storage)
        if key not in self._storages:
            self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        place = (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            self._storages[key], *place
        )


def fakeable(device: str | torch.device) -> torch.device:
    """Parse a device, and check that autograd can differentiate fake tensors on it.

    Raises:
        CaptureError: the device is unknown, or this machine cannot fake it. The message lists the
            device types that can be faked.
    """
    try:
        wanted_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CaptureError(f"device is {device!r}: {first_line(error)}") from None
    if wanted_device.type in _fakeable_types() and not _lacks(wanted_device):
        return wanted_device
    raise CaptureError(
        f"device '{wanted_device}' cannot be faked by this build of PyTorch ({torch.__version__}) on this "
        f"machine; it can fake: {', '.join(_fakeable_types())}. A cost model may still name a GPU: "
        "capture on 'cpu' and plan with cost='roofline:h100'"
    )


def _fakeable_types() -> list[str]:
    """Return the device types on which autograd can differentiate fake tensors on this machine."""
    built = {
        "cpu": True,
        "cuda": not _lacks(torch.device("cuda")),
        # Initialising one of these could end the process, so only the build of PyTorch is checked.
        "mps": torch.backends.mps.is_built(),
        "xpu": torch_compat.xpu_is_compiled(),
        torch_compat.get_privateuse1_backend_name(): hasattr(
            torch, torch_compat.get_privateuse1_backend_name()
        ),
    }
    return [name for name, is_there in built.items() if is_there]


def _lacks(device: torch.device) -> bool:
    """Return whether the device is a CUDA device that this machine does not have."""
    # Autograd needs the CUDA context of a device even for a fake tensor.
    return device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()


def _check_numbers(
    name: str, tensors: Sequence[torch.Tensor], fullgraph: bool, device: Any
) -> None:
    """Raise `CaptureError` if a capture with ``run=True`` cannot run the model on real tensors."""
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


@contextlib.contextmanager
def _quiet_dynamo() -> Iterator[None]:
    """Lift Dynamo's recompile limits and drop needless warnings of PyTorch inside of a ``with`` block."""
    config = torch_compat.dynamo_config
    names = ("debug", "info", "warning", "warning_once")
    loggers = {getattr(logging.Logger, n) for n in names if hasattr(logging.Logger, n)}
    with (
        warnings.catch_warnings(),
        _without_traces_of_operators(),
        config.patch(
            recompile_limit=1_000_000,
            # Captures should not use up the user's recompile limits.
            accumulated_recompile_limit=1_000_000,
            # Otherwise Dynamo would run a failing graph eagerly. The graph would be missing from the capture,
            # without an error.
            suppress_errors=False,
            # Under `torch.compile`, logging calls of the model break the graph.
            ignore_logging_functions={*config.ignore_logging_functions, *loggers},
        ),
    ):
        # After a graph break, Dynamo reads `.grad` of the intermediate tensors that enter the next graph.
        warnings.filterwarnings(
            "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
        )
        yield


@contextlib.contextmanager
def _without_traces_of_operators() -> Iterator[None]:
    """Inside of a ``with`` block, drop log records about operators that refuse fake arguments."""
    log = logging.getLogger(torch_compat.FakeTensorMode.__module__)

    def other(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR or "run meta for" not in str(record.msg)

    # The raised `CaptureError` reports the same failure, and the log would hide its message.
    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)

"""Measure an optimizer's memory by running two steps on fake parameters and tracking every storage.

Parameters and gradients are fake tensors, which take no memory. Other tensors that the optimizer
creates, such as a step count, are real and tiny. The measured memory includes the storages that
operators return, but not the memory that a kernel allocates internally.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat import torch_compat
from remat.errors import ProblemError, did_you_mean
from remat.graph.memory.storages import tensors_of
from remat.graph.memory.writes import written_places
from remat.running.measure import StorageTracker

#: Type of a callable that creates an optimizer for a list of parameters, such as a class of `torch.optim`.
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
_EXAMPLES = "name a class of torch.optim, such as 'adamw' or 'sgd:momentum=0.9'"
#: Name of the function with which PyTorch's optimizers decide whether to use their foreach implementation.
_CHOOSES_FOREACH = "_default_to_fused_or_foreach"
_CONSTANTS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUse:
    """Memory and memory traffic of an optimizer's steps; the memory excludes parameters and gradients.

    Attributes:
        name: name of the optimizer, as `read_optimizer` returns it.
        state_bytes: bytes of the state that the optimizer keeps between steps.
        step_bytes: most bytes of temporary memory alive at one time in a step, without the state.
        moved_bytes: total bytes that the operators of one step read and write.
    """

    name: str
    state_bytes: int
    step_bytes: int
    moved_bytes: int


def read_optimizer(optimizer: str | Make) -> tuple[str, Make]:
    """Return the name of an optimizer, and a function that creates the optimizer for a list of parameters.

    Args:
        optimizer: the name of a class in `torch.optim`, in upper or lower case, with arguments after a
            colon as in ``"sgd:momentum=0.9,nesterov=True"``; or a callable that creates an optimizer for a
            list of parameters.

    Raises:
        ProblemError: there is no such class, the arguments cannot be read, or ``optimizer`` is not callable.
    """
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise ProblemError(
                f"optimizer is a {type(optimizer).__name__}; {_EXAMPLES}, or give a class or a function "
                "that makes an optimizer of a list of parameters"
            )
        inner = getattr(optimizer, "func", optimizer)
        return getattr(inner, "__name__", type(inner).__name__), optimizer
    kind, arguments = _class_and_arguments(optimizer)
    return optimizer, lambda parameters: kind(parameters, **arguments)


def optimizer_code(optimizer: str | Make) -> str:
    """Return Python code that creates an optimizer for ``model.parameters()``; empty if ``optimizer`` is a callable."""
    if not isinstance(optimizer, str):
        return ""
    kind, named = _class_and_arguments(optimizer)
    arguments = [f"{key}={value!r}" for key, value in named.items()]
    return f"torch.optim.{kind.__name__}({', '.join(['model.parameters()', *arguments])})"


def _class_and_arguments(optimizer: str) -> tuple[Any, dict[str, Any]]:
    """Return the class and arguments named by a text such as ``sgd:momentum=0.9``, or raise a ProblemError."""
    name, _, text = optimizer.partition(":")
    classes = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    del classes["optimizer"]  # the abstract base class
    kind = classes.get(name.strip().lower())
    if kind is None:
        meant = did_you_mean(name.lower(), classes) or ";"
        raise ProblemError(
            f"optimizer is '{optimizer}', but torch.optim has no '{name}'{meant} {_EXAMPLES}"
        )
    try:
        call: Any = ast.parse(f"f({text})", mode="eval").body
        if call.args or not all(k.arg for k in call.keywords):
            raise ValueError(text)
        return kind, {k.arg: _literal(k.value) for k in call.keywords}
    except (ValueError, SyntaxError, AttributeError):
        raise ProblemError(
            f"optimizer is '{optimizer}', whose arguments '{text}' cannot be read; expected key=value "
            "with commas between them, as in 'sgd:momentum=0.9,nesterov=True'"
        ) from None


def _literal(value: ast.expr) -> Any:
    """Return the value of a Python literal; true, false and none may be in upper or lower case."""
    if isinstance(value, ast.Name) and value.id.lower() in _CONSTANTS:
        return _CONSTANTS[value.id.lower()]
    return ast.literal_eval(value)


def trace_optimizer(
    optimizer: str | Make,
    parameters: Sequence[torch.Tensor],
    *,
    without_gradient: frozenset[int] = frozenset(),
    foreach: bool = False,
) -> OptimizerUse:
    """Run two steps of an optimizer on fake parameters, and return the steps' memory and memory traffic.

    Args:
        optimizer: as for `read_optimizer`.
        parameters: tensors with the shapes, strides and dtypes of the parameters; the tensors are not
            changed.
        without_gradient: indices of the parameters that get no gradient.
        foreach: whether to select the foreach implementation, as PyTorch does on a GPU, unless the user
            chose an implementation.

    Raises:
        ProblemError: the optimizer cannot be read or created, or its step does not run on fake tensors.
    """
    name, make = read_optimizer(optimizer)
    # Optimizers create some real tensors of their own, such as step counts.
    mode = torch_compat.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [torch.empty_strided(p.size(), p.stride(), dtype=p.dtype) for p in parameters]
    copies = [torch.nn.Parameter(f, requires_grad=f.is_floating_point()) for f in fakes]
    tracker = _Steps()
    for parameter in copies:
        tracker.add(parameter)
    parameter_bytes = tracker.current
    before_step = most = 0
    try:
        running = make(copies)
        if not isinstance(running, torch.optim.Optimizer):
            raise TypeError(f"it made a {type(running).__name__}, no torch.optim.Optimizer")
        if foreach:
            _select_foreach(running)
        with tracker:
            # The first step creates the state, so the second step shows the usual traffic.
            for nth in range(2):
                with torch.no_grad():
                    for i, parameter in enumerate(copies):
                        if i not in without_gradient:
                            parameter.grad = torch.empty_like(parameter)
                before_step = before_step if nth else tracker.current
                tracker.peak, tracker.moved = tracker.current, 0
                running.step()
                most = max(most, tracker.peak - before_step)
                running.zero_grad(set_to_none=True)
    except Exception as error:  # user code may raise any exception
        raise ProblemError(
            f"optimizer '{name}' cannot be traced: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; {_EXAMPLES}, or give a function that makes an "
            "optimizer of a list of parameters",
            option="optimizer",
        ) from error
    state = tracker.current - parameter_bytes
    return OptimizerUse(
        name=name,
        state_bytes=state,
        step_bytes=max(0, most - state),
        moved_bytes=tracker.moved,
    )


def _select_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Select an optimizer's foreach implementation, if it has one and the user chose no implementation."""
    kinds = [k for k in type(optimizer).__mro__ if k not in torch.optim.Optimizer.__mro__]
    modules = (sys.modules.get(kind.__module__) for kind in kinds)
    if not any(hasattr(module, _CHOOSES_FOREACH) for module in modules):
        return
    for group in optimizer.param_groups:
        is_user_choice = group.get("fused") or group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and not is_user_choice:
            group["foreach"] = True


class _Steps(StorageTracker):  # type: ignore[no-untyped-call]
    """Tracker of alive storages that also adds up the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = func is torch.ops.aten._local_scalar_dense.default
        if is_number and hasattr(args[0], "fake_mode"):
            # A fake tensor has no values, so the number is 1.
            return 1.0 if args[0].is_floating_point() else 1
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.moved += _moved(func, args, kwargs or {}, out)
        return out


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operator call reads and writes; 0 for a call that only returns views."""
    reads = _storages((args, kwargs))
    places = written_places(func)
    writes = _storages([args[k] if k < len(args) else kwargs.get(name) for k, name in places])
    results = {k: b for k, b in _storages(out).items() if k not in reads}
    if not writes and not results:
        return 0
    return sum(reads.values()) + sum(writes.values()) + sum(results.values())


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of each tensor in ``value``, as a dict with the id of the tensor's storage as key."""
    return {torch_compat.storage_id(v.untyped_storage()): v.nbytes for v in tensors_of(value)}

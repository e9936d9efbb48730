"""Measure an optimizer's memory: run two steps on fake parameters, and track every storage.

Parameters and gradients are fake tensors, so that no byte of them is allocated. What the optimizer makes
beside them (a step count, say) is real, and tiny. The step allocates what its operators return; what a kernel
allocates for itself is not seen.
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
from remat.graph.storages import tensors_of
from remat.running.measure import StorageTracker

#: What makes an optimizer of parameters: a class, a function, `functools.partial` of either.
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
_EXAMPLES = "name a class of torch.optim, such as 'adamw' or 'sgd:momentum=0.9'"
#: By what PyTorch's optimizers decide to work on all parameters at once.
_CHOOSES_FOREACH = "_default_to_fused_or_foreach"
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUse:
    """Memory and traffic of an optimizer's steps, beyond parameters and gradients.

    Attributes:
        name: the class of the optimizer.
        state_bytes: bytes of what it keeps from step to step.
        step_bytes: most bytes that its step has alive at once beyond that.
        moved_bytes: bytes that the operators of a step read and write.
    """

    name: str
    state_bytes: int
    step_bytes: int
    moved_bytes: int


def read_optimizer(optimizer: str | Make) -> tuple[str, Make]:
    """Name and factory of an optimizer.

    Args:
        optimizer: the name of a class in `torch.optim` in any case, with arguments behind a colon,
            ``"sgd:momentum=0.9,nesterov=True"``; or what makes an optimizer of a list of parameters.

    Raises:
        ProblemError: there is none of that name, its arguments cannot be read, or it is nothing to call.
    """
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise ProblemError(
                f"optimizer is a {type(optimizer).__name__}; {_EXAMPLES}, or give a class or a function "
                "that makes an optimizer of a list of parameters"
            )
        inner = getattr(optimizer, "func", optimizer)
        return getattr(inner, "__name__", type(inner).__name__), optimizer
    name, _, text = optimizer.partition(":")
    known = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    del known["optimizer"]  # the base of all
    kind = known.get(name.strip().lower())
    if kind is None:
        meant = did_you_mean(name.lower(), known) or ";"
        raise ProblemError(
            f"optimizer is '{optimizer}', but torch.optim has no '{name}'{meant} {_EXAMPLES}"
        )
    given = _arguments(optimizer, text)
    return optimizer, lambda parameters: kind(parameters, **given)


def _arguments(optimizer: str, text: str) -> dict[str, Any]:
    """The keyword arguments behind the colon."""
    try:
        call: Any = ast.parse(f"f({text})", mode="eval").body
        if call.args or not all(k.arg for k in call.keywords):
            raise ValueError(text)
        return {k.arg: _literal(k.value) for k in call.keywords}
    except (ValueError, SyntaxError, AttributeError):
        raise ProblemError(
            f"optimizer is '{optimizer}', whose arguments '{text}' cannot be read; expected key=value "
            "with commas between them, as in 'sgd:momentum=0.9,nesterov=True'"
        ) from None


def _literal(value: ast.expr) -> Any:
    if isinstance(value, ast.Name) and value.id.lower() in _WORDS:
        return _WORDS[value.id.lower()]
    return ast.literal_eval(value)


def trace_optimizer(
    optimizer: str | Make,
    parameters: Sequence[torch.Tensor],
    *,
    without_gradient: frozenset[int] = frozenset(),
    foreach: bool = False,
) -> OptimizerUse:
    """Runs two steps of an optimizer on fake parameters, and follows every storage.

    Args:
        optimizer: as for `read_optimizer`.
        parameters: tensors of the shapes, strides and types of the parameters; they are not changed.
        without_gradient: positions of those that get no gradient.
        foreach: whether it works on all parameters at once where it has the choice and nothing else was
            said, as PyTorch's optimizers do on a GPU.

    Raises:
        ProblemError: the optimizer cannot be read or made, or its step cannot be run so.
    """
    name, make = read_optimizer(optimizer)
    mode = torch_compat.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [torch.empty_strided(p.size(), p.stride(), dtype=p.dtype) for p in parameters]
    made = [torch.nn.Parameter(f, requires_grad=f.is_floating_point()) for f in fakes]
    tracker = _Steps()
    for parameter in made:
        tracker.add(parameter)
    own = tracker.current
    given = most = 0
    try:
        running = make(made)
        if not isinstance(running, torch.optim.Optimizer):
            raise TypeError(f"it made a {type(running).__name__}, no torch.optim.Optimizer")
        if foreach:
            _work_at_once(running)
        with tracker:
            for nth in range(2):
                with torch.no_grad():
                    for i, parameter in enumerate(made):
                        if i not in without_gradient:
                            parameter.grad = torch.empty_like(parameter)
                given = given if nth else tracker.current
                tracker.peak, tracker.moved = tracker.current, 0
                running.step()
                most = max(most, tracker.peak - given)
                running.zero_grad(set_to_none=True)
    except Exception as error:  # foreign code; what it raises has no class of its own
        wrong = ProblemError(
            f"optimizer '{name}' cannot be traced: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; {_EXAMPLES}, or give a function that makes an "
            "optimizer of a list of parameters"
        )
        wrong.option = "optimizer"
        raise wrong from error
    state = tracker.current - own
    return OptimizerUse(
        name=name,
        state_bytes=state,
        step_bytes=max(0, most - state),
        moved_bytes=tracker.moved,
    )


def _work_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer work on all parameters at once, as it would by itself on a GPU."""
    kinds = [k for k in type(optimizer).__mro__ if k not in torch.optim.Optimizer.__mro__]
    modules = (sys.modules.get(kind.__module__) for kind in kinds)
    if not any(hasattr(module, _CHOOSES_FOREACH) for module in modules):
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") or group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and not chosen:
            group["foreach"] = True


class _Steps(StorageTracker):  # type: ignore[no-untyped-call]
    """Follows storages, counts the bytes that operators move, and knows a number where a fake has none."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = func is torch.ops.aten._local_scalar_dense.default
        if is_number and hasattr(args[0], "fake_mode"):
            return 1.0 if args[0].is_floating_point() else 1
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.moved += _moved(func, args, kwargs or {}, out)
        return out


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that a call reads and writes; 0 where it only looks at what is there."""
    read = _storages((args, kwargs))
    signature = torch_compat.schema(func).arguments
    in_place = {a.name for a in signature if a.alias_info is not None and a.alias_info.is_write}
    named = {**{a.name: v for a, v in zip(signature, args, strict=False)}, **kwargs}
    written = _storages([v for name, v in named.items() if name in in_place])
    made = {k: b for k, b in _storages(out).items() if k not in read}
    if not written and not made:
        return 0
    return sum(read.values()) + sum(written.values()) + sum(made.values())


def _storages(value: Any) -> dict[int, int]:
    """Bytes of the tensors in a value, one for each storage."""
    return {torch_compat.storage_id(v.untyped_storage()): v.nbytes for v in tensors_of(value)}

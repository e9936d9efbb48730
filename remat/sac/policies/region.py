"""Context managers that apply policies to the operators of a checkpointed region.

A region is the code that one call of `torch.utils.checkpoint.checkpoint` runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat, torch_older
from remat.errors import PolicyError
from remat.sac.policies.compose import (
    Policy,
    PolicyLike,
    as_policy,
    ask,
    compose,
    end,
    fresh,
    name_of,
)
from remat.sac.policies.consistency import RandomOps, Writes

#: Type of the argument ``context_fn`` of PyTorch's ``checkpoint(..., use_reentrant=False, context_fn=…)``.
ContextFn = Callable[[], tuple[Any, Any]]


def context_fn(
    *policies: PolicyLike, module: str = "", allow_cache_entry_mutation: bool = False
) -> ContextFn:
    """Convert policies to the ``context_fn`` argument of `torch.utils.checkpoint.checkpoint`.

    A verdict is a policy's answer for an operator. Unlike PyTorch's own context managers, those that this function
    returns keep the verdicts in a region consistent. For example, a random operator is saved if an earlier random
    operator is saved. `remat.sac.policies.consistency` lists all rules for verdicts. A change to a saved tensor is an
    error in backward, unless a saved operator of the region makes the change.

    Args:
        policies: policies, or lists of operators to save; several are combined by `compose`.
        module: name of the region for error messages.
        allow_cache_entry_mutation: whether to accept changes to saved tensors without checks. The
            caller must then ensure that gradients stay correct.

    Returns:
        A function without arguments, which returns two context managers: the first for forward, the
        second for recomputation.

    Raises:
        ProblemError: no policy is given, or an argument is neither a policy nor a list of operators.
        PolicyError: raised when the region runs, if a policy fails or a MUST verdict breaks a rule.
    """
    policy = as_policy(policies[0]) if len(policies) == 1 else compose(*policies)
    # A partial, unlike a closure, can be pickled with the model to which `apply` gives it.
    return functools.partial(_contexts, policy, module, allow_cache_entry_mutation)


def _contexts(policy: Policy, module: str, allow_cache_entry_mutation: bool) -> tuple[Any, Any]:
    """Return the two context managers for one run of a checkpointed region: for forward, and for recomputation."""
    traced = is_traced()
    run = _Run(policy, module)
    # A compiler's trace recomputes nothing: verdicts of the policy become tags of nodes. Partitioners keep
    # random numbers consistent, and the traced graph is functionalised, so it contains no writes.
    if not traced:
        run.random = RandomOps()
        run.writes = None if allow_cache_entry_mutation else Writes()
    forward, recompute = torch_older.selective_contexts(
        run, allow_cache_entry_mutation=traced or allow_cache_entry_mutation, traced=traced
    )
    return (forward, recompute) if traced else (_forward(forward, run), _Recompute(recompute, run))


def is_traced() -> bool:
    """Whether a compiler is tracing the operators that currently run."""
    # Dynamo and AOTAutograd have a tracing context; make_fx by itself has only a proxy mode.
    proxies = torch_compat.get_dispatch_mode(torch_compat.TorchDispatchModeKey.PROXY)
    return proxies is not None or torch_compat.TracingContext.try_get() is not None


class _Run:
    """Policy for one run of a checkpointed region; PyTorch calls the policy once for each operator of forward."""

    def __init__(self, policy: Policy, module: str) -> None:
        self.random: RandomOps | None = None
        self.writes: Writes | None = None
        self._policy = fresh(policy)
        self._module = module

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        try:
            verdict = ask(self._policy, ctx, op, args, kwargs)
            if self.writes is not None:
                verdict = self.writes.adjust(verdict, op, args, kwargs)
            # The adjustment for writes comes before that for random operators, because it may save a random operator.
            if self.random is not None:
                verdict = self.random.adjust(verdict, op, args, kwargs)
            if self.writes is not None:
                self.writes.record(verdict, op, args, kwargs, ctx.op_output)
        except PolicyError as error:
            raise PolicyError(f"{self._where}: {error}") from error.__cause__
        return verdict

    def end(self, cache: Any) -> None:
        """After forward, call the policy's ``end()``; let PyTorch's cache of results accept saved operators' writes."""
        try:
            end(self._policy)
        except PolicyError as error:
            raise PolicyError(f"{self._where}: {error}") from error.__cause__
        if self.writes is not None:
            self.writes.accept(cache)

    def check(self) -> None:
        """Raise a PolicyError if recomputation would read a changed tensor from outside the region."""
        try:
            if self.writes is not None:
                self.writes.check()
        except PolicyError as error:
            raise PolicyError(f"{self._where}: {error}") from None

    def save_last(self) -> None:
        """Save one more tensor for backward at the region's end, if an operator wrote random numbers to an argument."""
        # PyTorch stops a recomputation when the region's last tensor is saved. Autograd saves an argument that
        # receives random numbers before the operator writes to it, so another tensor must be the last one.
        if self.random is not None and self.random.wrote_argument:
            _Saving.apply(_LEAF)  # type: ignore[no-untyped-call]

    @property
    def _where(self) -> str:
        if self._module:
            return f"module '{self._module}'"
        return f"region with policy '{name_of(self._policy)}'"


#: Argument of `_Saving`, because autograd saves nothing if no argument requires a gradient.
_LEAF = torch.empty(0, requires_grad=True)
#: The tensor that `_Saving` saves. PyTorch detaches a saved leaf, which fails under a fake mode.
_EMPTY = torch.empty(0)


class _Saving(torch.autograd.Function):
    """Autograd function that saves a tensor. It runs no operator, because policies of outer regions would see one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> None:
        ctx.save_for_backward(_EMPTY)


@contextlib.contextmanager
def _forward(mode: Any, run: _Run) -> Iterator[None]:
    """Run forward in PyTorch's context manager; call `_Run.end` and `_Run.save_last` if forward raises no exception."""
    with mode:
        yield
    # This line is not reached after an exception in forward, because missing operators would raise a second error.
    run.end(mode.storage)
    run.save_last()


class _Recompute:
    """PyTorch's context manager for recomputation, which runs `_Run.check` first and `_Run.save_last` at the end."""

    def __init__(self, mode: Any, run: _Run) -> None:
        self._mode = mode
        self._run = run
        self.storage = mode.storage  # PyTorch's context manager has this attribute

    def __enter__(self) -> Any:
        self._run.check()
        return self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        if error[0] is None:
            self._run.save_last()

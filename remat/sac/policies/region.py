"""One checkpointed region: the two contexts that PyTorch enters, and policies behind them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat import torch_compat
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

#: What ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=…)`` wants.
ContextFn = Callable[[], tuple[Any, Any]]


def context_fn(
    *policies: PolicyLike, module: str = "", allow_cache_entry_mutation: bool = False
) -> ContextFn:
    """Policies as what `torch.utils.checkpoint.checkpoint` takes for ``context_fn``.

    Beyond what PyTorch does by itself, decisions are kept consistent. A random operator that a policy
    would rather recompute, though one before it is saved, is saved as well, and so is what writes in
    place to a saved tensor; where a MUST is in the way, it is refused. A saved tensor may be written
    to by what is saved within the region; any other change to it is an error in backward.

    Args:
        policies: policies, or lists of operators to save; several are composed, see `compose`.
        module: what to call the region in messages.
        allow_cache_entry_mutation: do not look after writes in place, and accept changes to saved
            tensors; it is then up to the caller that they do no harm.

    Raises:
        ProblemError: something in it is no policy.
        PolicyError: when it runs: a policy fails, or cannot be followed.
    """
    policy = as_policy(policies[0]) if len(policies) == 1 else compose(*policies)

    def contexts() -> tuple[Any, Any]:
        if is_traced():
            # Nothing is recomputed in a trace: verdicts become tags. Partitioners keep random numbers
            # and writes consistent, on a graph in which nothing writes.
            return _contexts(_Run(policy, module), True)
        run = _Run(policy, module, RandomOps(), None if allow_cache_entry_mutation else Writes())
        forward, recompute = _contexts(run, allow_cache_entry_mutation)
        return _Forward(forward, run), _Recompute(recompute, run)

    return contexts


def _contexts(run: _Run, allow_cache_entry_mutation: bool) -> tuple[Any, Any]:
    make: Any = create_selective_checkpoint_contexts
    forward, recompute = make(run, allow_cache_entry_mutation=allow_cache_entry_mutation)
    return forward, recompute


def is_traced() -> bool:
    """Whether operators run to be compiled, and not for their results."""
    proxies = torch_compat.get_dispatch_mode(torch_compat.TorchDispatchModeKey.PROXY)
    return proxies is not None or torch_compat.TracingContext.try_get() is not None


class _Run:
    """The policy of one run of a region, as PyTorch calls it: once for each operator of forward."""

    def __init__(
        self,
        policy: Policy,
        module: str,
        random: RandomOps | None = None,
        writes: Writes | None = None,
    ) -> None:
        self._policy = fresh(policy)
        self._module = module
        self._random = random
        self._writes = writes

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        try:
            verdict = ask(self._policy, ctx, op, args, kwargs)
            if self._writes is not None:
                verdict = self._writes.settle(verdict, op, args, kwargs)
            if self._random is not None:
                verdict = self._random.settle(verdict, op, args, kwargs)
            if self._writes is not None:
                self._writes.record(verdict, op, args, kwargs, ctx.op_output)
        except PolicyError as error:
            raise PolicyError(f"{self._where}: {error}") from error.__cause__
        return verdict

    def end(self, cache: Any) -> None:
        """Forward is over; ``cache`` is what PyTorch has saved of it."""
        try:
            end(self._policy)
        except PolicyError as error:
            raise PolicyError(f"{self._where}: {error}") from error.__cause__
        if self._writes is not None:
            self._writes.accept(cache)

    def check(self) -> None:
        """Recomputation begins.

        Raises:
            PolicyError: it would read other numbers than forward did.
        """
        try:
            if self._writes is not None:
                self._writes.check()
        except PolicyError as error:
            raise PolicyError(f"{self._where}: {error}") from None

    @property
    def _where(self) -> str:
        if self._module:
            return f"module '{self._module}'"
        return f"region with policy '{name_of(self._policy)}'"


class _Forward:
    """PyTorch's forward context, and a word to the policy when forward is over."""

    def __init__(self, mode: Any, run: _Run) -> None:
        self._mode = mode
        self._run = run

    def __enter__(self) -> Any:
        return self._mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        if kind is None:
            self._run.end(self._mode.storage)


class _Recompute:
    """PyTorch's context of recomputation, once it is known to find what forward found."""

    def __init__(self, mode: Any, run: _Run) -> None:
        self._mode = mode
        self._run = run
        self.storage = mode.storage  # as PyTorch's own context has it

    def __enter__(self) -> Any:
        self._run.check()
        return self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

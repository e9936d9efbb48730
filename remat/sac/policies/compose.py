"""Compose several checkpointing policies into one, and check the answers that policies return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat
from remat.errors import PolicyError, ProblemError

#: Type of a policy. `torch.utils.checkpoint` calls a policy as ``policy(ctx, op, *args, **kwargs)``.
Policy = Callable[..., CheckpointPolicy]
#: Type of an argument that PyTorch accepts as a policy: a policy, or a list of operators to save.
PolicyLike = Policy | Sequence[Any]

SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
MUST = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD,
)


def compose(*policies: PolicyLike) -> Policy:
    """Compose several checkpointing policies into one policy.

    For each operator, the composed policy calls every given policy exactly once, in order. Even if an
    earlier policy's answer decides, later policies are called, because a policy may count operators.

    A policy's MUST answer beats every PREFER answer. Without a MUST answer, the first answer other
    than PREFER_RECOMPUTE decides.

    A policy that counts operators may define the methods ``fresh()`` and ``end()``. Each forward of a region uses the
    new policy that ``fresh()`` returns, and calls the new policy's ``end()`` at the end of forward.

    Args:
        policies: policies, or lists of operators that must be saved.

    Raises:
        ProblemError: no policy is given, or an argument is neither a policy nor a list of operators.
        PolicyError: raised by the composed policy if two MUST answers differ, or if a policy raises
            an exception or returns something other than a `CheckpointPolicy`.
    """
    if not policies:
        raise ProblemError("nothing to compose: expected at least one policy")
    return _Composed(tuple(map(as_policy, policies)))


@dataclass(frozen=True, slots=True)
class _Composed:
    """Policy that calls several policies and combines their answers; see `compose`."""

    parts: tuple[Policy, ...]

    def fresh(self) -> Policy:
        return _Composed(tuple(map(fresh, self.parts)))

    def end(self) -> None:
        for part in self.parts:
            end(part)

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Every policy is called, because a policy may count operators.
        answers = [ask(p, ctx, op, args, kwargs) for p in self.parts]
        musts = [(p, a) for p, a in zip(self.parts, answers, strict=True) if a in MUST]
        for other, answer in musts[1:]:
            if answer is not musts[0][1]:
                raise PolicyError(
                    f"{op}: policy '{name_of(musts[0][0])}' says {musts[0][1].name}, policy "
                    f"'{name_of(other)}' says {answer.name}; expected at most one verdict that is a "
                    "MUST: let one of them prefer"
                )
        if musts:
            return musts[0][1]
        preferences = (a for a in answers if a is not CheckpointPolicy.PREFER_RECOMPUTE)
        return next(preferences, CheckpointPolicy.PREFER_RECOMPUTE)

    def __str__(self) -> str:
        return f"compose({', '.join(map(name_of, self.parts))})"


@dataclass(frozen=True, slots=True)
class _Listed:
    """Policy that answers MUST_SAVE for listed operators and PREFER_RECOMPUTE for all others."""

    ops: frozenset[Any]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        listed = op in self.ops
        return CheckpointPolicy.MUST_SAVE if listed else CheckpointPolicy.PREFER_RECOMPUTE

    def __str__(self) -> str:
        return f"save {', '.join(sorted(map(str, self.ops)))}"


def as_policy(policy: PolicyLike) -> Policy:
    """Return a callable policy unchanged; convert a list of operators to a policy that saves them.

    Raises:
        ProblemError: ``policy`` is neither callable nor a list of operators with overloads.
    """
    if callable(policy):
        return policy
    if isinstance(policy, str) or not isinstance(policy, Sequence):
        raise ProblemError(
            f"expected a policy or a list of operators, got {policy!r:.60}; a policy is called as "
            "policy(ctx, op, *args, **kwargs)"
        )
    for op in policy:
        if isinstance(op, torch_compat.OpOverloadPacket):
            overloads = ", ".join(f"{op}.{o}" for o in op.overloads()[:3])  # type: ignore[no-untyped-call]
            raise ProblemError(
                f"'{op}' stands for several operators; name one of them, as {overloads}"
            )
        if not isinstance(op, (torch_compat.OpOverload, torch_compat.HigherOrderOperator)):
            raise ProblemError(
                f"expected operators to save, as torch.ops.aten.mm.default, got {op!r}"
            )
    return _Listed(frozenset(policy))


def ask(
    policy: Policy, ctx: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> CheckpointPolicy:
    """Return a policy's answer for an operator; raise a PolicyError if the policy fails or gives no valid answer."""
    answer: Any  # a user's policy may return anything
    try:
        answer = policy(ctx, op, *args, **kwargs)
    except PolicyError:  # the message of a PolicyError already says what to do
        raise
    except Exception as error:
        raise PolicyError(
            f"{op}: policy '{name_of(policy)}' raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, CheckpointPolicy):
        hint = ""
        if isinstance(answer, bool):
            meant = "MUST_SAVE" if answer else "PREFER_RECOMPUTE"
            hint = f": PyTorch reads {answer} as {meant}"
        raise PolicyError(
            f"{op}: policy '{name_of(policy)}' returned {answer!r:.60}; expected a "
            f"torch.utils.checkpoint.CheckpointPolicy{hint}"
        )
    return answer


def fresh(policy: Policy) -> Policy:
    """Return the policy for the next forward: ``policy.fresh()``, or ``policy`` if it has no method ``fresh``."""
    renew = getattr(policy, "fresh", None)
    renewed: Policy = policy if renew is None else renew()
    return renewed


def end(policy: Policy) -> None:
    """Call a policy's ``end()``, if the policy defines this method."""
    ended = getattr(policy, "end", None)
    if ended is not None:
        ended()


def name_of(policy: Policy) -> str:
    """Return a policy's name for error messages; a `functools.partial` has the name of the wrapped function."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    named = getattr(policy, "__qualname__", None) or getattr(policy, "__name__", None)
    if named is not None:
        return str(named)
    printed = str(policy)
    # A default repr contains an address, which differs from run to run.
    return type(policy).__qualname__ if printed.startswith("<") else printed

"""Compose several checkpointing policies, and check their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat
from remat.errors import PolicyError, ProblemError

#: ``policy(ctx, op, *args, **kwargs)``, as `torch.utils.checkpoint` calls it.
Policy = Callable[..., CheckpointPolicy]
#: A policy, or the operators to save, as PyTorch takes them.
PolicyLike = Policy | Sequence[Any]

SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
MUST = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD,
)


def compose(*policies: PolicyLike) -> Policy:
    """One policy out of several.

    Every policy is asked about every operator exactly once, in the order given, whatever the others
    said: a policy may count. A MUST beats every PREFER. Where nobody insists, the first answer other
    than PREFER_RECOMPUTE holds, which is also the answer of those that have no opinion.

    A policy with a method ``fresh()`` is asked for a fresh one each time that a region runs; so is
    what is composed of it.

    Args:
        policies: policies, or lists of operators that must be saved.

    Raises:
        ProblemError: something in it is neither.
        PolicyError: when it runs: two policies insist on different things, or one raised, or
            answered with something other than a `CheckpointPolicy`.
    """
    if not policies:
        raise ProblemError("nothing to compose: expected at least one policy")
    return _Composed(tuple(map(as_policy, policies)))


@dataclass(frozen=True, slots=True)
class _Composed:
    parts: tuple[Policy, ...]

    def fresh(self) -> Policy:
        return _Composed(tuple(map(fresh, self.parts)))

    def end(self) -> None:
        for part in self.parts:
            end(part)

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        answers = [ask(p, ctx, op, args, kwargs) for p in self.parts]
        firm = [(p, a) for p, a in zip(self.parts, answers, strict=True) if a in MUST]
        for other, answer in firm[1:]:
            if answer is not firm[0][1]:
                raise PolicyError(
                    f"{op}: policy '{name_of(firm[0][0])}' says {firm[0][1].name}, policy "
                    f"'{name_of(other)}' says {answer.name}; expected at most one verdict that is a "
                    "MUST: let one of them prefer"
                )
        if firm:
            return firm[0][1]
        wishes = (a for a in answers if a is not CheckpointPolicy.PREFER_RECOMPUTE)
        return next(wishes, CheckpointPolicy.PREFER_RECOMPUTE)

    def __str__(self) -> str:
        return f"compose({', '.join(map(name_of, self.parts))})"


@dataclass(frozen=True, slots=True)
class _Listed:
    """Saves the operators of a list."""

    ops: frozenset[Any]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        listed = op in self.ops
        return CheckpointPolicy.MUST_SAVE if listed else CheckpointPolicy.PREFER_RECOMPUTE

    def __str__(self) -> str:
        return f"save {', '.join(sorted(map(str, self.ops)))}"


def as_policy(policy: PolicyLike) -> Policy:
    """A policy as it is; a list of operators as the policy that saves them.

    Raises:
        ProblemError: it is neither, or an operator stands there without its overload.
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
            known = ", ".join(f"{op}.{o}" for o in op.overloads()[:3])  # type: ignore[no-untyped-call]
            raise ProblemError(f"'{op}' stands for several operators; name one of them, as {known}")
        if not isinstance(op, (torch_compat.OpOverload, torch_compat.HigherOrderOperator)):
            raise ProblemError(
                f"expected operators to save, as torch.ops.aten.mm.default, got {op!r}"
            )
    return _Listed(frozenset(policy))


def ask(
    policy: Policy, ctx: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> CheckpointPolicy:
    """The answer of a policy for an operator.

    Raises:
        PolicyError: it raised, or it answered with something other than a `CheckpointPolicy`.
    """
    answer: Any  # for it may answer otherwise than it should
    try:
        answer = policy(ctx, op, *args, **kwargs)
    except PolicyError:
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
    """The policy for one more run of a region: a new one if it counts and says how to renew it."""
    renew = getattr(policy, "fresh", None)
    made: Policy = policy if renew is None else renew()
    return made


def end(policy: Policy) -> None:
    """Tells a policy that the forward of its region is over, if it has a method ``end()``."""
    ended = getattr(policy, "end", None)
    if ended is not None:
        ended()


def name_of(policy: Policy) -> str:
    """Name of a policy in messages."""
    named = getattr(policy, "__qualname__", None) or getattr(policy, "__name__", None)
    if named is not None:
        return str(named)
    printed = str(policy)
    return type(policy).__qualname__ if printed.startswith("<") else printed

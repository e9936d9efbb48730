"""Convert the plan of a module to a checkpointing policy."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import PolicyError, ProblemError
from remat.sac.policies.compose import Policy
from remat.sac.policies.region import is_traced
from remat.sac.run.operators import is_skipped
from remat.sac.solve.plan import ModulePlan


def planned(plan: ModulePlan, *, firm: bool = True, strict: bool = True) -> Policy:
    """Convert the plan of one module to a checkpointing policy, for `remat.sac.context_fn` or `remat.sac.compose`.

    ::

        contexts = remat.sac.context_fn(remat.sac.planned(plan["model.layers.0"]))
        checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    The policy counts operators, so each run of the module needs a policy object of its own. The policy's method
    ``fresh()`` returns a policy for the module's next run.

    Args:
        plan: the plan of one module.
        firm: whether the policy answers MUST_SAVE and MUST_RECOMPUTE. If not, the policy answers PREFER_SAVE
            and PREFER_RECOMPUTE, which a compiler or another policy's MUST may override.
        strict: whether a module that runs other operators than the plan lists raises a PolicyError. If False, the n-th
            ``aten.mm.default`` that runs is treated as the n-th one in the plan. With ``strict=False``, the policy
            gives only PREFER answers in eager code, and operators that the plan lacks are recomputed. Without
            ``strict``, gradients stay correct, but memory may differ from the plan's estimate.

    Raises:
        ProblemError: ``plan`` is not a `ModulePlan`.
    """
    if not isinstance(plan, ModulePlan):
        raise ProblemError(f"expected the plan of a module (ModulePlan), got {plan!r:.60}")
    return _Planned(plan, firm=firm, strict=strict)


_FIRM = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
_PREFERRED = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)


class _Planned:
    """Policy that looks up each operator in a module's plan: by position, or by name during tracing."""

    def __init__(self, plan: ModulePlan, *, firm: bool, strict: bool) -> None:
        self._plan = plan
        # A lookup by name may find another operator than the planned one. In eager code, the lookup's verdict is
        # therefore a PREFER, which `remat.sac.policies.consistency` may change to fit the verdicts of other operators.
        self._save, self._recompute = _FIRM if firm and (strict or is_traced()) else _PREFERRED
        self._stored = frozenset(plan.stored)
        # A compiler sees slightly different operators: dropout is one operator in a trace, and several in eager code.
        self._by_index = strict and not is_traced()
        self._options = {"firm": firm, "strict": strict}
        self._position = 0
        # For lookups by name: for each operator's name, the positions in the plan that are not matched yet.
        self._unmatched: dict[str, deque[int]] = {}
        if not self._by_index:
            for i, name in enumerate(plan.ops):
                self._unmatched.setdefault(name, deque()).append(i)

    def fresh(self) -> Policy:
        return _Planned(self._plan, **self._options)

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_skipped(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        name = str(op)
        index = self._next_index(name) if self._by_index else self._index_by_name(name)
        if index is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return self._save if index in self._stored else self._recompute

    def end(self) -> None:
        """At the end of forward, raise a PolicyError if fewer operators have run than the module's plan lists."""
        if self._by_index and self._position != len(self._plan.ops):
            raise _other_operators(
                f"it ends after {self._position} operators, and the plan has {len(self._plan.ops)}"
            )

    def _next_index(self, name: str) -> int:
        """Return the position of a running operator; raise a PolicyError if the plan lists another operator next."""
        index = self._position
        expected = self._plan.ops[index] if index < len(self._plan.ops) else "the end"
        if name != expected:
            raise _other_operators(f"operator {index} is {name}, and the plan has {expected}")
        self._position += 1
        return index

    def _index_by_name(self, name: str) -> int | None:
        """Return the plan's next unmatched position of an operator named ``name``; None if no such position is left."""
        positions = self._unmatched.get(name)
        return positions.popleft() if positions else None

    def __str__(self) -> str:
        return f"plan of {self._plan.name or 'the model'}"


def _other_operators(difference: str) -> PolicyError:
    return PolicyError(
        f"the module runs other operators than when it was estimated: {difference}. Estimate it as it is "
        "trained: same inputs, dtypes, autocast and wrappers (modules sharded one by one gather their "
        "parameters within it: checkpoint what is sharded, or what is below); or take the plan with strict=False"
    )

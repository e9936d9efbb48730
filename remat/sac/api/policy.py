"""A plan as checkpointing policies, for modules that are wrapped by hand."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, overload

from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import PolicyError, ProblemError
from remat.sac.policies.compose import Policy, PolicyLike
from remat.sac.policies.region import ContextFn, context_fn, is_traced
from remat.sac.run.operators import is_skipped
from remat.sac.solve.plan import ModulePlan, SACPlan


@overload
def policy(
    plan: ModulePlan,
    *others: PolicyLike,
    firm: bool = True,
    strict: bool = True,
    allow_cache_entry_mutation: bool = False,
) -> ContextFn: ...


@overload
def policy(
    plan: SACPlan,
    *others: PolicyLike,
    firm: bool = True,
    strict: bool = True,
    allow_cache_entry_mutation: bool = False,
) -> dict[str, ContextFn]: ...


def policy(
    plan: ModulePlan | SACPlan,
    *others: PolicyLike,
    firm: bool = True,
    strict: bool = True,
    allow_cache_entry_mutation: bool = False,
) -> ContextFn | dict[str, ContextFn]:
    """A plan as what `torch.utils.checkpoint.checkpoint` takes for ``context_fn``.

    ::

        contexts = remat.sac.policy(plan)
        checkpoint(layer, x, use_reentrant=False, context_fn=contexts["model.layers.0"])

    Args:
        plan: the plan of a module, or of a model.
        others: more policies, which the plan's is composed with; see `remat.sac.compose`.
        firm: whether the plan's verdicts are MUSTs. If not, a MUST of another policy beats them, and
            a compiler may.
        strict: whether other operators than those of the plan are an error. If not, an operator
            has the verdict of the one of its name that was met as often; verdicts are then wishes,
            and what the plan does not know is recomputed. Gradients are right either way, memory
            may be more or less than was planned.
        allow_cache_entry_mutation: as in `remat.sac.context_fn`.

    Returns:
        One ``context_fn``; for the plan of a model, module name to ``context_fn``.

    Raises:
        ProblemError: this is no plan, or something is no policy.
        PolicyError: when it runs: the module runs other operators than those of the plan, or the
            policies cannot be followed together.
    """
    if isinstance(plan, SACPlan):
        return {
            m.name: policy(
                m,
                *others,
                firm=firm,
                strict=strict,
                allow_cache_entry_mutation=allow_cache_entry_mutation,
            )
            for m in plan.modules
        }
    if not isinstance(plan, ModulePlan):
        raise ProblemError(f"expected a plan (SACPlan or ModulePlan), got {plan!r:.60}")
    return context_fn(
        planned(plan, firm=firm, strict=strict),
        *others,
        module=plan.name,
        allow_cache_entry_mutation=allow_cache_entry_mutation,
    )


def planned(plan: ModulePlan, *, firm: bool = True, strict: bool = True) -> Policy:
    """The policy of a plan by itself, to `remat.sac.compose` with others; see `policy`.

    It counts: it is for one run of the module, and its ``fresh()`` is for the next one.
    """
    return _Planned(plan, firm=firm, strict=strict)


_FIRM = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
_WISHES = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)


class _Planned:
    """Looks its verdicts up by the index of the operator.

    In a trace operators differ a little: dropout, say, is one operator there. So it is never strict
    about them, and leaves strangers to the partitioner.
    """

    def __init__(self, plan: ModulePlan, *, firm: bool, strict: bool) -> None:
        self._plan = plan
        self._save, self._again = _FIRM if firm and (strict or is_traced()) else _WISHES
        self._stored = frozenset(plan.stored)
        self._by_index = strict and not is_traced()
        self._made_of = {"firm": firm, "strict": strict}
        self._met = 0
        self._met_by_name: Counter[str] = Counter()
        self._by_name: dict[tuple[str, int], int] = {}
        if not self._by_index:
            count: Counter[str] = Counter()
            for i, name in enumerate(plan.ops):
                self._by_name[name, count[name]] = i
                count[name] += 1

    def fresh(self) -> Policy:
        return _Planned(self._plan, **self._made_of)

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_skipped(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        name = _name(op)
        index = self._next_index(name) if self._by_index else self._index_by_name(name)
        if index is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return self._save if index in self._stored else self._again

    def end(self) -> None:
        """Forward is over.

        Raises:
            PolicyError: it ended early.
        """
        if self._by_index and self._met != len(self._plan.ops):
            raise _other_operators(
                f"it ends after {self._met} operators, and the plan has {len(self._plan.ops)}"
            )

    def _next_index(self, name: str) -> int:
        index = self._met
        expected = self._plan.ops[index] if index < len(self._plan.ops) else "the end"
        if name != expected:
            raise _other_operators(f"operator {index} is {name}, and the plan has {expected}")
        self._met += 1
        return index

    def _index_by_name(self, name: str) -> int | None:
        place = (name, self._met_by_name[name])
        self._met_by_name[name] += 1
        return self._by_name.get(place)

    def __str__(self) -> str:
        return f"plan of {self._plan.name or 'the model'}"


@functools.cache
def _name(op: Any) -> str:
    return str(op)


def _other_operators(what: str) -> PolicyError:
    return PolicyError(
        f"the module runs other operators than when it was estimated: {what}. Estimate it as it is "
        "trained: same inputs, dtypes, autocast and wrappers (modules sharded one by one gather their "
        "parameters within it: checkpoint what is sharded, or what is below); or take the plan with strict=False"
    )

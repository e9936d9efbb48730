"""Keep the list that `remat.plans` returns: the plans that the compiled models of this process run."""

from __future__ import annotations

import weakref
from collections import deque

from remat.planning.plan import Plan

#: Number of the newest plans that the list of plans keeps.
MOST_PLANS = 1_000
#: For each of the newest plans: a weak reference to the plan, and a copy of the plan without its graph modules. So the
#: list keeps no graph modules alive. `plans` returns the copy once the plan itself no longer exists.
_PLANS: deque[tuple[weakref.ref[Plan], Plan]] = deque(maxlen=MOST_PLANS)


def plans() -> tuple[Plan, ...]:
    """Return the plans that compiled models of this process run, newest last; at most 1,000.

    A plan has its forward and backward modules as long as its compiled step, or another reference to the plan, exists.
    Once the compiled step and all references to the plan are gone, only the plan's numbers, such as its peak, remain. A
    number that `remat.partitioner` did not need for planning, such as the peak if the budget is a ratio, is then 0, for
    unknown.
    """
    # Another thread may compile, and append a plan to the list, meanwhile.
    return tuple(plan() or figures for plan, figures in _PLANS.copy())


def add(plan: Plan, figures: Plan) -> None:
    """Append a plan to the list that `remat.plans` returns.

    Args:
        plan: the plan.
        figures: copy of the plan without its modules, which the list keeps once the plan no longer exists.
    """
    _PLANS.append((weakref.ref(plan), figures))

"""The plans that compiled models of this process run on: the result of `remat.plans`."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from remat.planning.plan import Plan

#: Plans that are listed, at most.
MOST_PLANS = 1_000
#: The newest plans: each by itself for as long as somebody holds it, then by its figures.
_PLANS: deque[tuple[weakref.ref[Plan], Plan]] = deque(maxlen=MOST_PLANS)
_LOCK = threading.Lock()


def plans() -> tuple[Plan, ...]:
    """The plans that compiled models of this process run on, newest last; the newest 1,000 of them.

    A plan has its modules for as long as its compiled step is there, or anybody else holds it; its
    figures stay.
    """
    with _LOCK:
        return tuple(plan() or figures for plan, figures in _PLANS)


def add(plan: Plan) -> None:
    """Add a plan."""
    with _LOCK:
        _PLANS.append((weakref.ref(plan), plan.figures))


def replace(plan: Plan, other: Plan) -> None:
    """Replace a plan by another."""
    with _LOCK:
        for k, (listed, _) in enumerate(_PLANS):
            if listed() is plan:
                _PLANS[k] = (weakref.ref(other), other.figures)


def remove(plan: Plan | None) -> None:
    """Remove a plan."""
    if plan is None:  # as is each whose modules are gone
        return
    with _LOCK:
        kept = [pair for pair in _PLANS if pair[0]() is not plan]
        _PLANS.clear()
        _PLANS.extend(kept)

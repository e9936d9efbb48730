"""An expanding core: exact knapsacks in plain Python integers.

Order the items by value per weight and take them while they fit: the first that does not is the
break item. Optimal choices differ from this one near the break item only, so states grow from
there, adding one item behind it and removing one before it in turn. A state that something lighter
beats is dropped, and so is one whose bound, all room filled at the next item's value per weight,
does not beat the best answer known. When none is left, that answer is optimal.

Source: D. Pisinger, "A minimal algorithm for the 0-1 knapsack problem", Operations Research 45
(1997).
"""

from __future__ import annotations

import time
from fractions import Fraction

import remat

WORK = 3_000_000  # states to look at: counted, so that the answer is the same on every machine
MOST_STATES = 100_000  # at once: some ten megabytes, and a third of a second to go through


class Core(remat.Solver):
    """An expanding core in plain Python: proves most problems, needs no library."""

    name = "core"
    exact = False  # work is limited; then there is a bound instead of a proof
    deterministic = True
    time_limit = True

    def solve(self, problem, *, time_limit=None):
        deadline = None if time_limit is None else time.monotonic() + time_limit
        weights, values, capacity = problem.weights, problem.values, problem.capacity
        order = sorted(
            (i for i, w in enumerate(weights) if w <= capacity and values[i]),
            key=lambda i: (-_ratio(values[i], weights[i]), i),
        )
        fitting = _fitting(order, weights, capacity)
        best, best_value = (0, None), problem.value_of(order[:fitting])
        # A state: weight, value, and the last change made to get there.
        states = [(problem.weight_of(order[:fitting]), best_value, None)]
        left, right, work, by_clock = fitting - 1, fitting, WORK, False
        while states and (left >= 0 or right < len(order)):
            work -= len(states)
            by_clock = deadline is not None and time.monotonic() > deadline
            if work < 0 or len(states) > MOST_STATES or by_clock:
                break
            if right < len(order):
                states = _widen(states, order[right], weights, values, +1)
                right += 1
            if left >= 0 and weights[order[left]]:
                states = _widen(states, order[left], weights, values, -1)
                left -= 1
            elif left >= 0:
                left = -1  # what weighs nothing is never removed
            for weight, value, change in states:
                if weight <= capacity and value > best_value:
                    best, best_value = (value, change), value
            bound = _bounds(order, left, right, weights, values, capacity)
            states = [s for s in states if bound(*s) > best_value]

        bound = _bounds(order, left, right, weights, values, capacity)
        most = max((bound(*s) for s in states), default=best_value)
        saved, change = set(order[:fitting]), best[1]
        while change is not None:
            item, change = change
            saved ^= {item}
        return remat.Answer(saved, max(most, best_value), by_clock=by_clock)


def _ratio(value, weight):
    return Fraction(value, weight) if weight else float("inf")


def _fitting(order, weights, capacity):
    """How many items fit one after the other, up to the first that does not."""
    for count, i in enumerate(order):
        capacity -= weights[i]
        if capacity < 0:
            return count
    return len(order)


def _widen(states, item, weights, values, sign):
    """Both lists, without and with the change, by weight; only what nothing lighter beats."""
    weight, value = sign * weights[item], sign * values[item]
    changed = [(w + weight, v + value, (item, change)) for w, v, change in states]
    merged, top = [], -1
    for state in sorted([*states, *changed], key=lambda s: (s[0], -s[1])):
        if state[1] > top:
            merged.append(state)
            top = state[1]
    return merged


def _bounds(order, left, right, weights, values, capacity):
    """A function from a state to the value that nothing grown from it exceeds."""
    more = (values[order[right]], weights[order[right]]) if right < len(order) else (0, 1)
    less = (values[order[left]], weights[order[left]]) if left >= 0 else None

    def bound(weight, value, _):
        room = capacity - weight
        if room >= 0:
            return value + room * more[0] // more[1]
        if less is None or not less[1]:
            return -1  # too heavy, and nothing left to remove
        return value + room * less[0] // less[1]

    return bound


@remat.hookimpl
def remat_solvers():
    """What this package brings; remat calls it when somebody asks for a solver."""
    return [Core]

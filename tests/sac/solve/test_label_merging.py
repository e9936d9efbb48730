"""Merging labels: which of them are dropped, and what a gap and a lack of room change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.sac.solve.choices import ModuleChoice
from remat.sac.solve.cuts import BudgetCut
from remat.sac.solve.label_merging import TooManyLabelsError, _unbeaten, cheapest
from remat.sac.solve.module_classes import ModuleClass, picoseconds
from remat.sac.solve.program import Backend, Linear
from remat.sac.solve.search import floor, solve

HIGHS = Backend(name=None, gap=0.0, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 6), min_size=n + 1, max_size=n + 1), min_size=1)
    ),
    st.sampled_from([1, 3, 48]),
)
def test_what_is_left_is_beaten_by_nobody(rows: list[list[int]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat.sac.solve.label_merging._BLOCK", block)
        left = _unbeaten(np.array([r[0] for r in rows]), np.array([r[1:] for r in rows]))

    def beats(a: Sequence[int], b: Sequence[int]) -> bool:
        return a[0] <= b[0] and all(x >= y for x, y in zip(a[1:], b[1:], strict=True))

    kept = [rows[i] for i in left]
    assert all(any(beats(k, row) for k in kept) for row in rows)
    assert not any(beats(a, b) for a, b in itertools.permutations(kept, 2))


def one_class(times: Sequence[int], gains: Sequence[int], members: int) -> ModuleClass:
    made = tuple(
        ModuleChoice(stored=(), kept_bytes=100 - g, recompute_ps=t)
        for t, g in zip(times, gains, strict=True)
    )
    return ModuleClass(
        members=tuple(range(members)),
        parent=-1,
        each=members,
        gains=np.array([[g] for g in gains]),
        choices=made,
    )


CLASSES = (one_class([10, 17, 31], [12, 20, 33], 3), one_class([4, 9], [3, 11], 2))


def cut(need: int, factor: int = 1) -> BudgetCut:
    return BudgetCut(gains=np.concatenate([c.gains[:, 0] * factor for c in CLASSES]), need=need)


def floors(found: ModuleClass) -> list[int]:
    return [o.recompute_ps - o.slack_ps for o in found.choices]


def with_floors(found: ModuleClass, floors: Sequence[int]) -> ModuleClass:
    slack = zip(found.choices, floors, strict=True)
    return replace(found, choices=tuple(replace(o, slack_ps=o.recompute_ps - f) for o, f in slack))


def least(need: int, classes: Sequence[ModuleClass] = CLASSES) -> int:
    """By trying everything, each choice at its floor."""
    per_class = []
    for x in classes:
        options = [(0, 0), *zip(floors(x), x.gains[:, 0].tolist(), strict=True)]
        per_class.append([*itertools.combinations_with_replacement(options, len(x.members))])
    decisions = ([*itertools.chain(*picked)] for picked in itertools.product(*per_class))
    return min(sum(t for t, _ in d) for d in decisions if sum(g for _, g in d) >= need)


@pytest.mark.parametrize("need", [1, 25, 50, 77, 100, 121])
def test_the_least_time_is_found_and_with_a_gap_one_near_it(need: int) -> None:
    times = picoseconds(CLASSES)
    prices = Linear.of(CLASSES, [cut(need)], times).prices()
    assert prices is not None
    _, best, bound = cheapest(CLASSES, [cut(need)], times, prices)
    assert best == bound == least(need)
    counts, good, below = cheapest(CLASSES, [cut(need)], times, prices, gap=0.2)
    assert below <= best <= good
    assert below >= 0.8 * good
    assert cut(need).missing(counts) <= 0


def test_what_was_found_is_handed_on_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remat.sac.solve.label_merging.MOST_PAIRS", 3)
    times = picoseconds(CLASSES)
    with pytest.raises(TooManyLabelsError) as error:
        cheapest(CLASSES, [cut(77)], times, np.array([0.5]))
    assert error.value.good is None
    answer = solve(CLASSES, [cut(77)], HIGHS, 0.0)
    assert answer is not None
    assert (answer.exact, round(answer.bound)) == (True, least(77))


@pytest.mark.parametrize("known", [0, 7, 40])
def test_an_answer_that_is_known_shows_highs_what_to_look_at(known: int) -> None:
    times = picoseconds(CLASSES)
    linear = Linear.of(CLASSES, [cut(77)], times)
    found = linear.solve(HIGHS, 0.0, at_most=float(least(77) + known))
    assert found is not None
    counts, bound = found
    assert times @ counts == round(bound) == least(77)


@pytest.mark.parametrize("need", [25, 50, 77, 100, 121])
def test_the_floor_is_below_what_left_out_choices_could_take(need: int) -> None:
    """Between 17 and 31 was left out what takes 19, and frees no more than the last."""
    thinned = (with_floors(CLASSES[0], (10, 17, 19)), CLASSES[1])
    best = least(need)
    assert floor(CLASSES, [cut(need)], float(best)) == best
    assert floor(thinned, [cut(need)], float(best)) <= least(need, thinned)
    far = (CLASSES[0], with_floors(CLASSES[1], (4, 8)))
    assert best - 2 <= floor(far, [cut(need)], float(best)) <= least(need, far)

"""What ranks say to one another, with a store in this process and clocks that are not real."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import remat
from remat.errors import ProblemError
from remat.graph.capture.rank_fingerprint import outline
from remat.passes.core.state import State
from remat.passes.ranks import agree_ranks
from remat.passes.ranks import protocol as ranks
from remat.passes.ranks.agree_ranks import AgreeRanks
from remat.passes.ranks.protocol import Question, Ranks, RankWarning, Verdict
from remat.planning.pipelines import prepare, split
from remat.planning.request import PlanRequest
from tests.graphs import calls, joint_of, traced

X = torch.ones(4, 3)


@dataclass
class Clock:
    """Time that passes only while somebody sleeps; then something may happen."""

    now: float = 0.0
    then: Callable[[float], object] = lambda now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.25
        self.now += seconds
        self.then(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_REPORTED", set())


@pytest.fixture
def pair() -> tuple[Ranks, Ranks]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Ranks(store, 0), Ranks(store, 1)


Pair = tuple[Ranks, Ranks]


def question(f: Callable[..., Any] = torch.sin, asked: str = "budget 0.5") -> Question:
    return Question(graph=f.__name__, outline=outline(traced(f, X)), options=asked)


def verdict(rank: int, *saved: int) -> Verdict:
    return Verdict(
        rank=rank,
        saved=saved,
        snapshots=(),
        saved_bytes=1,
        recomputed=1,
        capacity=2,
        solver="s",
        deterministic=True,
    )


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_decision_stands(pair: Pair, clock: Clock, first: int) -> None:
    one, other = verdict(first, 1, 2), verdict(1 - first, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if first == 0 else "ignore", RankWarning)
        assert pair[first].settle(question(), one, 30.0 if first == 0 else 0.0) == one
        assert pair[1 - first].settle(question(), other, 0.0) == one
    assert pair[first].settle(question(), verdict(first, 4), 0.0) == one
    assert clock.now == 0.0, "rank 0 waits for nobody"


def test_rank_0_goes_first_where_it_comes_in_time(pair: Pair, clock: Clock) -> None:
    def arrive(now: float) -> None:
        if now >= 5.0 and "arrived" not in seen:
            seen.append("arrived")
            pair[0].settle(question(), verdict(0, 7), 30.0)

    seen: list[str] = []
    clock.then = arrive
    assert pair[1].settle(question(), verdict(1, 8), 30.0) == verdict(0, 7)
    assert 5.0 <= clock.now <= 5.25


def test_a_rank_alone_waits_once_until_rank_0_is_back(pair: Pair, clock: Clock) -> None:
    with pytest.warns(RankWarning, match=r"rank 1 goes on .* 'sin': .* within 30 s"):
        assert pair[1].settle(question(), verdict(1, 8), 30.0).saved == (8,)
    assert clock.now == pytest.approx(30.0)
    for f in (torch.cos, torch.tan):
        assert pair[1].settle(question(f), verdict(1, 9), 30.0).saved == (9,)
    assert clock.now == pytest.approx(30.0)  # rank 0 is still where it was
    # Rank 0 comes to what it was missed at, and takes over what was decided there.
    assert pair[0].settle(question(), verdict(0, 1), 30.0).saved == (8,)
    assert pair[1].settle(question(torch.exp), verdict(1, 9), 20.0).saved == (9,)
    assert clock.now == pytest.approx(50.0)


def test_a_rank_0_that_has_begun_is_waited_for_again(pair: Pair, clock: Clock) -> None:
    pair[0]._announce("at/-, graph 1", question())
    with pytest.warns(RankWarning, match="rank 0 has not decided on it within 30 s"):
        pair[1].settle(question(), verdict(1, 8), 30.0)
    pair[1].settle(question(torch.cos), verdict(1, 9), 30.0)
    assert clock.now == pytest.approx(60.0)


def test_a_rank_with_another_graph_is_not_waited_for(pair: Pair, clock: Clock) -> None:
    pair[0].settle(question(torch.cos), verdict(0), 30.0)
    with pytest.warns(RankWarning, match=r"rank 1 alone has 'sin' .*; rank 0 alone has 'cos'"):
        pair[1].settle(question(), verdict(1), 30.0)
    assert clock.now == 0.0


def test_what_was_told_once_goes_to_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remat.ranks")
    for i, f in enumerate((torch.sin, torch.cos)):
        pair[0].settle(question(torch.tan, asked=f.__name__), verdict(0), 0.0)
        asked = question(f, asked=f.__name__)
        if i == 0:
            with pytest.warns(RankWarning):
                pair[1].settle(asked, verdict(1), 0.0)
        else:
            pair[1].settle(asked, verdict(1), 0.0)  # a second warning would be an error here
    assert [r.message.count("alone has") for r in caplog.records] == [2, 2]


class Broken(dist.Store):  # type: ignore[misc]
    """A store whose other end has gone."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        raise dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, value: Any) -> None:
        self.check([key])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broken_store_is_left_alone(rank: int) -> None:
    store = Broken()
    alone = Ranks(store, rank)
    with pytest.warns(RankWarning, match=f"rank {rank} cannot compare decisions .* Connection res"):
        assert alone.settle(question(), verdict(rank, 1), 30.0) == verdict(rank, 1)
    assert alone.lost
    assert store.asked == 1


# Whom there is to talk to ---------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Callable[..., None]]:
    yield dist.init_process_group
    dist.destroy_process_group()


def test_there_is_nobody_without_a_group_or_in_one_of_one(group: Callable[..., None]) -> None:
    assert ranks.other_ranks() is None
    group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    assert ranks.other_ranks() is None


def test_a_fake_group_has_nobody_in_it(group: Callable[..., None]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group("fake", store=FakeStore(), rank=3, world_size=8)
    assert ranks.other_ranks() is None


# The pass -------------------------------------------------------------------------------------------


class Elsewhere:
    """Ranks of which another has decided already: as this one, but for some fields."""

    rank = 1

    def __init__(self) -> None:
        self.said: list[Verdict] = []
        self._fields: dict[str, Any] = {}

    def settle(self, question: Question, own: Verdict, wait_s: float) -> Verdict:
        self.said.append(own)
        return replace(own, **self._fields)

    def agree(self, state: State, *, capacity_too: bool = False, **fields: Any) -> State:
        """The state after the pass, if the other rank has decided on these fields."""
        self._fields = {"rank": 0, **fields}
        result = AgreeRanks(capacity_too=capacity_too).run(state)
        assert result.modified == (result.state is not state)
        return result.state


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    there = Elsewhere()
    monkeypatch.setattr(agree_ranks, "other_ranks", lambda: there)
    return there


@pytest.fixture(scope="module")
def decided() -> State:
    """Three products in a row; what they yield is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh())))
    return at_budget(prepare(joint_of(model, torch.ones(16, 8))), 1.0)


def at_budget(state: State, budget: float) -> State:
    request = PlanRequest.of(budget=budget, solver="lagrangian", cost="unit")
    return remat.PassManager((request.deciding(),)).run(state, in_place=True).state


def saved(state: State) -> tuple[str, ...]:
    assert state.decision is not None
    return state.decision.saved


def positions(state: State) -> tuple[int, ...]:
    """What a state keeps, by positions."""
    return tuple(i for i, n in enumerate(state.joint.graph.nodes) if n.name in saved(state))


def test_it_does_nothing_alone(decided: State) -> None:
    assert AgreeRanks().run(decided).state is decided


def test_a_decision_is_taken_over(elsewhere: Elsewhere, decided: State) -> None:
    smaller = at_budget(decided, 0.4)
    keep = positions(smaller)
    assert keep != positions(decided)
    with pytest.warns(RankWarning, match="which is taken .a clock ended a search"):
        state = elsewhere.agree(decided, saved=keep, solver="other", deterministic=False)
    assert saved(state) == saved(smaller)
    assert state.provenance is not None
    assert (state.provenance.solver, state.provenance.deterministic) == ("other", False)
    assert split(state).forward is not None


def test_a_decision_beyond_the_bytes_allowed_is_not_taken(
    elsewhere: Elsewhere, decided: State
) -> None:
    tight = at_budget(decided, 0.4)
    assert tight.provenance is not None
    assert tight.provenance.recompute_bound > 0
    assert tight.limits is not None
    theirs: dict[str, Any] = {"saved": positions(decided), "capacity": 5000}
    allowed = tight.limits.capacity
    with pytest.warns(RankWarning, match=rf"it would save \d+ bytes here, {allowed} allowed. Each"):
        assert elsewhere.agree(tight, **theirs) is tight
    # Under a budget on the peak, the bytes allowed are part of the decision.
    with pytest.warns(RankWarning, match="which is taken"):
        state = elsewhere.agree(tight, capacity_too=True, **theirs)
    assert saved(state) == saved(decided)
    assert state.limits is not None
    assert state.provenance is not None
    assert (state.limits.capacity, state.provenance.recompute_bound) == (5000, 0)


def test_a_decision_that_is_none_for_this_graph_is_not_taken(
    elsewhere: Elsewhere, decided: State
) -> None:
    view = [n.name for n in decided.joint.graph.nodes].index("t")
    with pytest.warns(RankWarning, match="does not fit here: .*'t', which cannot be saved"):
        assert elsewhere.agree(decided, saved=(*positions(decided), view)) is decided


def orders(state: State) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What both halves of a state run beyond views, by positions."""
    done = split(state)
    runs = [n.name for n in state.joint.graph.nodes if n.name not in ("t", "t_1", "t_2")]
    at = {n.name: i for i, n in enumerate(state.joint.graph.nodes)}
    assert done.forward is not None
    assert done.backward is not None
    forward, backward = (
        tuple(at[name] for name in calls(half) if name in runs)
        for half in (done.forward, done.backward)
    )
    return forward, backward


def test_an_order_is_taken_over(elsewhere: Elsewhere, decided: State) -> None:
    forward, backward = orders(decided)
    again = (*forward[:2], forward[1], *forward[2:])  # one of them runs twice
    with pytest.warns(RankWarning, match="which is taken"):
        state = elsewhere.agree(decided, forward_order=again, backward_order=backward, recomputed=1)
    assert state.decision is not None
    assert len(state.decision.further_runs) == 1
    # It is said to other ranks in turn, and agreed on with those that have it.
    assert elsewhere.agree(state) is state
    first, second = elsewhere.said
    assert first.forward_order == ()
    assert (second.forward_order, second.backward_order) == (again, backward)
    assert second.recomputed == 1
    done = split(state)
    assert done.forward is not None
    assert sum("_again" in name for name in calls(done.forward)) == 1
    back = elsewhere.agree(state, forward_order=forward)  # which is told once
    assert back.decision is not None
    assert back.decision.further_runs == ()


def test_an_order_that_cannot_run_here_is_not_taken(elsewhere: Elsewhere, decided: State) -> None:
    forward, backward = orders(decided)
    theirs: dict[str, Any] = {"forward_order": forward[::-1], "backward_order": backward}
    with pytest.warns(RankWarning, match="does not fit here: .* is not there for .*. Each keeps"):
        assert elsewhere.agree(decided, **theirs) is decided


def test_orders_go_through_a_store(pair: Pair) -> None:
    rows = tuple(range(50_000))
    one = replace(verdict(0, 1), forward_order=rows, backward_order=rows)
    assert pair[0].settle(question(), one, 0.0) == one
    assert pair[1].settle(question(), verdict(1, 1), 0.0) == one


def test_an_earlier_decision_of_this_rank_counts(elsewhere: Elsewhere, decided: State) -> None:
    earlier = positions(at_budget(decided, 0.4))
    with pytest.warns(RankWarning, match=r"rank 1 found .*; before, it found .* which is taken"):
        elsewhere.agree(decided, rank=1, saved=earlier)


@pytest.mark.parametrize("wait_s", [-1, float("nan"), "30", True])
def test_a_wait_that_cannot_be_meant_is_refused(wait_s: Any) -> None:
    with pytest.raises(ProblemError, match="expected seconds, 0 or more"):
        AgreeRanks(wait_s=wait_s)
    with pytest.raises(ProblemError, match="expected seconds, 0 or more"):
        remat.partitioner(rank_wait_s=wait_s)

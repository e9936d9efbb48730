"""Agreement of the ranks of one job on a decision, through the store of their process group.

A rank claims its decision under a key: the graph's outline and the planning options. The first claim wins, and
every rank with the same key uses it, so no two ranks run different decisions for one graph. The other ranks
wait for a limited time, so that rank 0 usually claims first. No step here is a collective: a rank that
compiles more often, in another order or alone never hangs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from remat import torch_compat
from remat.errors import PlanError, warn
from remat.files import as_tuples
from remat.graph.rank_fingerprint import Outline, first_difference
from remat.units import format_bytes

#: The longest text that is put into a store; one of 8 MiB breaks the connection to a TCPStore.
LONGEST = 4 << 20

_LOG = logging.getLogger("remat.ranks")
_LOCK = threading.Lock()
_REPORTED: set[str] = set()


class RankWarning(UserWarning):
    """Ranks that do not plan the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The graph and options that a rank decides on.

    Attributes:
        graph: name of the graph, for messages.
        outline: the graph.
        asked: the options that the decision is made for, as text.
    """

    graph: str
    outline: Outline
    asked: str

    @property
    def key(self) -> str:
        """Where the decision is claimed; ranks with the same key share one."""
        text = json.dumps([self.outline.digest, self.asked])
        return f"decision/{hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision as ranks hand it to one another: names differ from rank to rank, positions do not.

    Attributes:
        rank: who decided.
        saved: positions in the joint graph of what is kept.
        snapshots: positions of the inputs of which a copy is kept.
        saved_bytes: bytes that it saves there.
        recomputed: how many operators run twice there.
        capacity: bytes that it was allowed there; None without a limit.
        solver: who decided there.
        deterministic: False if a clock ended the search there.
        forward_order: positions that forward runs, in this order; empty: as the passes arrange it.
        backward_order: likewise for backward.
    """

    rank: int
    saved: tuple[int, ...]
    snapshots: tuple[int, ...]
    saved_bytes: int
    recomputed: int
    capacity: int | None
    solver: str
    deterministic: bool
    forward_order: tuple[int, ...] = ()
    backward_order: tuple[int, ...] = ()

    @property
    def schedule(self) -> tuple[tuple[int, ...], ...]:
        """What is decided: what is kept, and what runs when."""
        return self.saved, self.snapshots, self.forward_order, self.backward_order

    def __str__(self) -> str:
        return f"{format_bytes(self.saved_bytes)} saved, {self.recomputed} operators recomputed"


class Ranks:
    """The ranks of one process group, as seen by one of them.

    Attributes:
        rank: who we are.
        lost: whether the store failed; it is left alone from then on.
    """

    def __init__(self, store: Any, rank: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.rank = rank
        self.lost = False
        self._shared: Any = PrefixStore("remat-1", store)
        self._compiled: Counter[str] = Counter()
        self._missed: str | None = None  # where rank 0 was waited for in vain
        self._absent: set[int] = set()  # ranks that did not answer in time, and have not come since
        self._settled: tuple[str, str] | None = None  # where, and what

    def settle(self, question: Question, own: Verdict, wait_s: float) -> Verdict:
        """The decision that counts: the first that any rank made for this question.

        Args:
            question: what was decided on.
            own: what this rank decided.
            wait_s: seconds for which rank 0 is given the chance to be first.
        """
        place = self._next_place()
        self._settled = (place, question.key)
        try:
            self._shared.set(f"here/{place}/{self.rank}", question.key)
            if self.rank == 0:
                self._announce(f"at/{place}", question)
            else:
                self._give_way(place, question, wait_s)
            claim = self._shared.compare_set(question.key, "", _packed(asdict(own)))
            return Verdict(**_unpacked(claim))
        # Stores raise RuntimeErrors; what is too large for them is our own error.
        except (RuntimeError, PlanError) as error:
            self._lose(error)
            return own

    def largest(self, number: int, wait_s: float) -> int:
        """The largest of the numbers that the ranks came to which run on the decision settled last.

        All of them get the same answer: the first that was claimed. A rank that comes after that has to take it,
        whatever its own number.

        Args:
            number: what this rank came to.
            wait_s: seconds for ranks to answer that may run on that decision too.
        """
        settled, self._settled = self._settled, None
        if settled is None:
            return number
        place, key = settled
        claim = f"{key}/largest"
        try:
            if not self._has(claim):
                self._shared.set(f"{key}/number/{self.rank}", str(number))
                self._await_numbers(place, key, wait_s)
            ranks = range(torch.distributed.get_world_size())
            places = [f"{key}/number/{rank}" for rank in ranks]
            numbers = [int(self._shared.get(at)) for at in places if self._has(at)]
            return int(self._shared.compare_set(claim, "", str(max(numbers, default=number))))
        except RuntimeError as error:
            self._lose(error)
            return number

    def _await_numbers(self, place: str, key: str, wait_s: float) -> None:
        """Waits until every rank that runs on a decision has said its number, or somebody has claimed the largest."""
        pending = {*range(torch.distributed.get_world_size())} - {self.rank}
        deadline, pause = time.monotonic() + wait_s, 0.002
        while pending and not self._has(f"{key}/largest"):
            for rank in sorted(pending):
                here = f"here/{place}/{rank}"
                if self._has(here):
                    self._absent.discard(rank)
                elsewhere = self._has(here) and self._shared.get(here).decode() != key
                if elsewhere or rank in self._absent or self._has(f"{key}/number/{rank}"):
                    pending.discard(rank)
            left = deadline - time.monotonic()
            if pending and left <= 0:
                self._absent |= pending
                names = ", ".join(f"rank {rank}" for rank in sorted(pending))
                tell(
                    "late",
                    f"rank {self.rank} goes on without knowing what a step takes as compiled on {names}, which has "
                    f"not said so within {wait_s:g} s. If it takes more there than its budget, it is not planned again",
                )
                return
            if pending:
                time.sleep(min(pause, left))
                pause = min(2 * pause, 0.25)

    def _lose(self, error: Exception) -> None:
        self.lost = True
        tell(
            "lost",
            f"rank {self.rank} cannot compare decisions with the other ranks and goes on with its "
            f"own: {type(error).__name__}: {error}",
        )

    def _next_place(self) -> str:
        """Where in the course of the program a graph is compiled, in words that ranks have in common.

        Dynamo's number for the function and for its compilation: a rank that compiles one function
        once more does not fall out of step with the others in the next one.
        """
        from remat.torch_compat import CompileContext

        where = str(CompileContext.current_compile_id() or "-")
        self._compiled[where] += 1
        return f"{where}, graph {self._compiled[where]}"

    def _announce(self, at: str, question: Question) -> None:
        """Says what rank 0 decides on, for the others to hold their graphs against."""
        # Rank 0 waits for nobody: of a difference it learns when it compiles its next graph.
        if "difference" not in _REPORTED and self._has("difference"):
            tell("difference", self._get("difference")["text"])
        data = {"graph": question.graph, "key": question.key, "asked": question.asked}
        self._shared.set(at, _packed({**data, "outline": asdict(question.outline)}))

    def _give_way(self, place: str, question: Question, wait_s: float) -> None:
        """Lets rank 0 decide first, if it has this graph and comes in time."""
        at = f"at/{place}"
        if self._missed and (self._has(self._missed) or self._has(at)):
            self._missed = None
        if self._missed:  # still where it was when it was waited for in vain
            wait_s = 0.0
        deadline, pause = time.monotonic() + wait_s, 0.002
        seen = False
        # Asked again and again instead of blocking: a wait in the store holds up everything else in
        # this process that talks to it, PyTorch's watchdogs among them.
        while not self._has(question.key):
            if not seen and self._has(at):
                first, seen = self._get(at), True
                if first["key"] != question.key:
                    self._tell_difference(place, question, first)
                    return
            left = deadline - time.monotonic()
            if left <= 0:
                self._absent.add(0)
                if self._missed is None:
                    self._missed = None if seen else at
                    tell("alone", self._alone(question, wait_s, seen))
                return
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.25)

    def _alone(self, question: Question, wait_s: float, seen: bool) -> str:
        late = "decided on it" if seen else "compiled anything here"
        return (
            f"rank {self.rank} goes on with its own plan for '{question.graph}': rank 0 has not {late} "
            f"within {wait_s:g} s. A rank that comes to the same graph later takes this plan over. Where "
            'ranks compile at different times on purpose, set options={"rank_wait_s": 0}'
        )

    def _tell_difference(self, place: str, question: Question, first: dict[str, Any]) -> None:
        theirs = Outline(**first["outline"])
        who = (f"rank {self.rank}", "rank 0")
        parts = first_difference(question.outline, theirs, who)
        if parts is None:
            parts = f"{who[0]} was asked for {question.asked}, {who[1]} for {first['asked']}"
        text = (
            f"{who[0]} and {who[1]} plan different things at the same point (compile {place}), "
            f"'{question.graph}' and '{first['graph']}': {parts}. Each gets a decision of its own, as "
            "it should be for the stages of a pipeline; where ranks are meant to do the same, look for "
            "what there depends on the rank"
        )
        self._shared.compare_set("difference", "", _packed({"text": text}))
        tell("difference", text)

    def _has(self, key: str) -> bool:
        return bool(self._shared.check([key]))

    def _get(self, key: str) -> dict[str, Any]:
        return _unpacked(self._shared.get(key))


#: By process group; an entry, and the store it holds, goes when its group goes.
_OF_GROUP: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()


def other_ranks() -> Ranks | None:
    """The ranks of the default process group; None without a group or with a single rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    # A fake group is one process that plays one rank of many.
    if distributed.get_world_size() < 2 or distributed.get_backend() == "fake":
        return None
    group: Any = distributed.group.WORLD
    store: Any = torch_compat.get_default_store()
    if store is None:
        return None
    with _LOCK:
        ranks = _OF_GROUP.get(group)
        if ranks is None:
            ranks = _OF_GROUP[group] = Ranks(store, distributed.get_rank())
    return None if ranks.lost else ranks


def _packed(data: dict[str, Any]) -> str:
    text = base64.b85encode(zlib.compress(json.dumps(data).encode())).decode()
    if len(text) > LONGEST:
        raise PlanError(
            f"a graph this large cannot be compared: {len(text)} bytes, at most {LONGEST}"
        )
    return text


def _unpacked(text: bytes) -> dict[str, Any]:
    data: dict[str, Any] = as_tuples(json.loads(zlib.decompress(base64.b85decode(text))))
    return data


def tell(kind: str, text: str) -> None:
    """The first of a kind in a process is a warning; all are in the log."""
    _LOG.info(text)
    with _LOCK:
        known = kind in _REPORTED
        _REPORTED.add(kind)
    if not known:
        warn(text, RankWarning, stacklevel=3)

"""Agreement of a job's ranks on one decision per graph, through the store of their process group.

A rank claims its decision: it stores the decision under a key made of the planning options and the
graph's outline (call targets, results and edges). The first claim wins: every rank with the same key
gets the decision that was stored first. Two ranks therefore use different decisions for one graph only
if the store fails, or if the claimed decision does not fit a rank. All ranks except rank 0 wait a
limited time, so that rank 0 usually stores its decision first. The protocol uses no collectives, so a
rank that compiles more often, in another order or alone never hangs.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from remat import torch_compat
from remat.errors import PlanError, warn
from remat.files import as_tuples
from remat.graph.capture.rank_fingerprint import Outline, first_difference
from remat.units import format_bytes

#: Longest text, in bytes, that is put into a store. A text of 8 MiB breaks the connection to a TCPStore.
LONGEST = 4 << 20

_LOG = logging.getLogger("remat.ranks")
_LOCK = threading.Lock()
#: Kinds of messages that this process has already shown as a warning; see `tell`.
_REPORTED: set[str] = set()


class RankWarning(UserWarning):
    """Issued if the ranks of a job plan differently, or cannot compare their plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A graph and the options to plan it with; ranks with the same question share one decision.

    Attributes:
        graph: name of the graph, for messages.
        outline: call targets, results and edges of the graph's nodes, for comparison between ranks.
        options: planning options of the decision, as text.
    """

    graph: str
    outline: Outline
    options: str

    @property
    def key(self) -> str:
        """Key under which the store holds the first decision for this question; equal questions have equal keys."""
        text = json.dumps([self.outline.digest, self.options])
        return f"decision/{hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision in the form in which ranks exchange decisions.

    A `Verdict` gives nodes by position in the joint graph, because the names of nodes differ from rank
    to rank.

    Attributes:
        rank: the rank that decided.
        saved: positions of the saved values.
        snapshots: positions of the inputs of which a copy is saved.
        saved_bytes: bytes that the decision saves on that rank.
        recomputed: number of runs of operators, on that rank, that repeat an earlier run.
        capacity: bytes that the decision was allowed to save on that rank; None without a limit.
        solver: name of the solver that decided on that rank.
        deterministic: False if a time limit ended the search on that rank.
        forward_order: positions of the nodes that forward runs, in order; empty if the passes choose
            the order.
        backward_order: positions of the nodes that backward runs, in order; empty if the passes choose
            the order.
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
        """Four tuples of nodes' positions: saved values, snapshots, forward's order, backward's order."""
        return self.saved, self.snapshots, self.forward_order, self.backward_order

    def __str__(self) -> str:
        return f"{format_bytes(self.saved_bytes)} saved, {self.recomputed} operators recomputed"


class Ranks:
    """Access of this process to the other ranks of one process group, through the group's store.

    Attributes:
        rank: rank of this process.
        lost: whether the store failed; the store is not used again afterwards.
    """

    def __init__(self, store: Any, rank: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.rank = rank
        self.lost = False
        # The prefix keeps the keys apart from those of PyTorch and other users of the store.
        self._shared: Any = PrefixStore("remat-1", store)
        self._compiled: Counter[str] = Counter()
        self._missed: str | None = None  # key that rank 0 did not set in time
        self._absent: set[int] = set()  # ranks that were late and have set no key since
        # Compilation (`_next_place`) and key (`Question.key`) of the last decision.
        self._last_decision: tuple[str, str] | None = None

    def settle(self, question: Question, own: Verdict, wait_s: float) -> Verdict:
        """Return the decision to use for a graph: the decision of the first rank that stored one for ``question``.

        If the store fails, this rank's decision ``own`` is returned, and `Ranks.lost` becomes True.
        """
        place = self._next_place()
        self._last_decision = (place, question.key)
        try:
            # Tells `_await_numbers` on other ranks which decision this rank uses.
            self._shared.set(f"here/{place}/{self.rank}", question.key)
            if self.rank == 0:
                self._announce(f"at/{place}", question)
            else:
                self._give_way(place, question, wait_s)
            # The expected value is empty, so only the first claim sets the key. All ranks get this first claim.
            claim = self._shared.compare_set(question.key, "", _packed(asdict(own)))
            return Verdict(**_unpacked(claim))
        # A store raises a RuntimeError, and `_packed` a PlanError for data too large for a store.
        except (RuntimeError, PlanError) as error:
            self._lose(error)
            return own

    def largest(self, number: int, wait_s: float) -> int:
        """Return the largest ``number`` of all ranks that use this rank's decision, the one `settle` returned last."""
        # All ranks get the same result: the first rank that ends its wait stores the largest number seen so far, and
        # this number stays. A rank that calls later gets the stored number even if its own is larger. If `settle` was
        # not called since the last `largest`, or the store fails, the result is ``number``.
        agreed, self._last_decision = self._last_decision, None
        if agreed is None:
            return number
        place, key = agreed
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
        """Wait until every rank that uses this rank's decision has stored its own argument of `largest`."""
        pending = {*range(torch.distributed.get_world_size())} - {self.rank}
        for _ in _polls(wait_s):
            for rank in sorted(pending):
                here = f"here/{place}/{rank}"
                if self._has(here):
                    self._absent.discard(rank)
                elsewhere = self._has(here) and self._shared.get(here).decode() != key
                # A rank that was late is waited for again only once it has begun this compilation.
                if elsewhere or rank in self._absent or self._has(f"{key}/number/{rank}"):
                    pending.discard(rank)
            if not pending or self._has(f"{key}/largest"):
                return
        self._absent |= pending
        names = ", ".join(f"rank {rank}" for rank in sorted(pending))
        tell(
            "late",
            f"rank {self.rank} goes on without knowing what a step takes as compiled on {names}, which has "
            f"not said so within {wait_s:g} s. If it takes more there than its budget, it is not planned again",
        )

    def _lose(self, error: Exception) -> None:
        """Stop using the store of the process group after the store has failed, and warn."""
        self.lost = True
        tell(
            "lost",
            f"rank {self.rank} cannot compare decisions with the other ranks and goes on with its "
            f"own: {type(error).__name__}: {error}",
        )

    def _next_place(self) -> str:
        """Return a text that identifies the current compilation in the same way on every rank."""
        from remat.torch_compat import CompileContext

        # If only one rank recompiles a function, the texts of later functions still agree between ranks.
        where = str(CompileContext.current_compile_id() or "-")
        self._compiled[where] += 1
        return f"{where}, graph {self._compiled[where]}"

    def _announce(self, at: str, question: Question) -> None:
        """Put rank 0's graph and options into the store, for comparison by the other ranks."""
        # Rank 0 does not wait before it decides, so it reads such a message only at its next graph.
        if "difference" not in _REPORTED and self._has("difference"):
            tell("difference", self._get("difference")["text"])
        data = {"graph": question.graph, "key": question.key, "options": question.options}
        self._shared.set(at, _packed({**data, "outline": asdict(question.outline)}))

    def _give_way(self, place: str, question: Question, wait_s: float) -> None:
        """Wait, for at most ``wait_s`` seconds, until rank 0 has decided on a graph equal to this rank's graph."""
        at = f"at/{place}"
        if self._missed and (self._has(self._missed) or self._has(at)):
            self._missed = None
        if self._missed:  # rank 0 has made no progress since the last wait
            wait_s = 0.0
        seen = False
        for _ in _polls(wait_s):
            if self._has(question.key):
                return
            if not seen and self._has(at):
                first, seen = self._get(at), True
                if first["key"] != question.key:
                    self._tell_difference(place, question, first)
                    return
        self._absent.add(0)
        if self._missed is None:
            self._missed = None if seen else at
            tell("alone", self._alone(question, wait_s, seen))

    def _alone(self, question: Question, wait_s: float, seen: bool) -> str:
        """Return the text of the warning that this rank decides without waiting longer for rank 0."""
        late = "decided on it" if seen else "compiled anything here"
        return (
            f"rank {self.rank} goes on with its own plan for '{question.graph}': rank 0 has not {late} "
            f"within {wait_s:g} s. A rank that comes to the same graph later takes this plan over. Where "
            'ranks compile at different times on purpose, set options={"rank_wait_s": 0}'
        )

    def _tell_difference(self, place: str, question: Question, first: dict[str, Any]) -> None:
        """Warn that this rank and rank 0 have different graphs or options; store the warning for rank 0 to issue."""
        theirs = Outline(**first["outline"])
        who = (f"rank {self.rank}", "rank 0")
        parts = first_difference(question.outline, theirs, who)
        if parts is None:
            parts = f"{who[0]} was asked for {question.options}, {who[1]} for {first['options']}"
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


#: Dict from process group to `Ranks`. The keys are weak, so that a store is freed with its group.
_OF_GROUP: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()


def other_ranks() -> Ranks | None:
    """Return the `Ranks` by which this process reaches the other ranks of the default process group.

    Returns:
        The access object; None without a process group, with a single rank, in a fake group, or after the
        store has failed.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    # In a fake group, one process simulates one rank of many, so no other rank exists.
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


def _polls(wait_s: float) -> Iterator[None]:
    """Yield at once, and then at growing intervals of at most 0.25 s until ``wait_s`` seconds have passed."""
    # A blocking wait would block every other user of the store in this process, such as PyTorch's watchdogs.
    deadline, pause = time.monotonic() + wait_s, 0.002
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.25)
        yield


def _packed(data: dict[str, Any]) -> str:
    """Return data as compressed text, which a store can hold and `_unpacked` reads."""
    text = base64.b85encode(zlib.compress(json.dumps(data).encode())).decode()
    if len(text) > LONGEST:
        raise PlanError(
            f"a graph this large cannot be compared: {len(text)} bytes, at most {LONGEST}"
        )
    return text


def _unpacked(text: bytes) -> dict[str, Any]:
    """Return the data that `_packed` turned into text, with tuples instead of JSON's lists."""
    data: dict[str, Any] = as_tuples(json.loads(zlib.decompress(base64.b85decode(text))))
    return data


def tell(kind: str, text: str) -> None:
    """Log a message; if it is the first message of its ``kind`` in this process, issue a warning too."""
    _LOG.info(text)
    with _LOCK:
        is_reported = kind in _REPORTED
        _REPORTED.add(kind)
    if not is_reported:
        warn(text, RankWarning)

"""The search for the smallest failing graph: delta debugging over edits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from remat.errors import ProblemError, RematError
from remat.graph.joint import JointGraph, outputs_of
from remat.graph.text import parse_joint, print_joint
from remat.graph.verify import Split, verify
from remat.planning import pipelines
from remat.plugins.registry import registry
from remat.reduction.edits import EDITS, GraphEdit, Item, fault_of, tidy

#: Whether a graph still fails.
Test = Callable[[JointGraph], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """Result of a reduction.

    Attributes:
        joint: the smallest graph found that still fails.
        before: nodes of the graph at the start; placeholders and the output node count.
        nodes: nodes of `joint`.
        tests: how often the test was run.
        known: how often it was not, as that very graph had been tried.
        refused: candidates that were no legal joint graph, and so never tested.
        interrupted: whether Ctrl-C ended the search.
    """

    joint: JointGraph
    before: int
    nodes: int
    tests: int
    known: int
    refused: int
    interrupted: bool


def reduce(
    joint: JointGraph,
    test: Test,
    *,
    progress: Callable[[str], None] | None = None,
) -> Reduced:
    """Removes and simplifies nodes of a joint graph as long as a test still fails.

    Gradients and outputs are dropped, results turned into inputs, calls left out, inputs merged, until
    none of these can be done alone. Every graph that the test sees is a legal joint graph, has been
    written as text and read back, and can be split; the order of candidates is the same in every run,
    and no graph is tested twice.

    Args:
        joint: the graph; it is not changed.
        test: whether a graph still fails: True keeps it. What it raises is not caught: a test that
            looks for an exception catches it, and says whether it is the one.
        progress: is told what is being tried, in words.

    Returns:
        The smallest graph found. Ctrl-C leaves the smallest so far.

    Raises:
        ProblemError: the graph does not fail at the start, or has no text form.
    """
    registry().learn_operators()
    search = _Search(test, progress or (lambda _: None))
    return search.run(joint)


class _Search:
    def __init__(self, test: Test, progress: Callable[[str], None]) -> None:
        self._test = test
        self._progress = progress
        self._seen: dict[bytes, bool] = {}
        self._tests = self._known = self._refused = 0
        self._splits = True
        self._best: JointGraph
        self._text: str  # of the best

    def run(self, joint: JointGraph) -> Reduced:
        self._text = print_joint(joint)
        start = self._best = parse_joint(self._text)
        self._splits = _split_is_legal(start)
        interrupted = False
        if not self._fails(start, self._text):
            raise ProblemError(
                f"graph '{joint.name}' does not fail: the test is to say so of the graph as it is. A "
                "Python function returns True where it fails, a command ends with an exit code other "
                "than 0"
            )
        try:
            self._rounds()
        except KeyboardInterrupt:
            interrupted = True
        return Reduced(
            joint=self._best,
            before=len(start.graph.nodes),
            nodes=len(self._best.graph.nodes),
            tests=self._tests,
            known=self._known,
            refused=self._refused,
            interrupted=interrupted,
        )

    def _rounds(self) -> None:
        """Every edit in turn, until a whole round changes nothing."""
        changed = True
        while changed:
            changed = False
            for edit in EDITS:
                changed |= self._minimise(edit)

    def _minimise(self, edit: GraphEdit) -> bool:
        """One edit on halves, then quarters, and so on, of what it can work on."""
        changed = False
        size = len(edit.items(self._best))
        while size:
            at = 0
            while at < len(items := edit.items(self._best)):
                if self._accept(edit, items[at : at + size]):
                    changed = True
                else:
                    at += size
            size //= 2
        return changed

    def _accept(self, edit: GraphEdit, items: list[Item]) -> bool:
        nodes = len(self._best.graph.nodes)
        self._progress(f"{edit.name}: {nodes} nodes, {self._tests} tests")
        try:
            candidate = tidy(edit.apply(self._best.copy(), items))
            text = print_joint(candidate) if fault_of(candidate) is None else self._text
            if text == self._text:
                self._refused += 1
                return False
            read = parse_joint(text)
        except RematError:  # no text says it, or nothing reads it
            self._refused += 1
            return False
        if _measure(read) >= _measure(self._best) or not self._fails(read, text):
            return False
        self._best, self._text = read, text
        return True

    def _fails(self, joint: JointGraph, text: str) -> bool:
        key = hashlib.sha256(text.encode()).digest()
        if key in self._seen:
            self._known += 1
            return self._seen[key]
        if self._splits and not _split_is_legal(joint):
            self._refused += 1
            self._seen[key] = False
            return False
        self._tests += 1
        self._seen[key] = self._test(joint.copy())
        return self._seen[key]


def _measure(joint: JointGraph) -> tuple[int, int, int, int]:
    """Measure that decreases with every accepted edit, so that the search ends."""
    nodes = list(joint.graph.nodes)
    calls = sum(n.op != "placeholder" for n in nodes)
    tags = sum(n.meta.get("recompute") is not None for n in nodes)
    read = sum(len(n.users) > 0 for n in nodes if n.op == "placeholder")
    edges = sum(len(n.all_input_nodes) for n in nodes)
    return calls, len(nodes), read, len(outputs_of(joint.graph)) + tags + edges


def _split_is_legal(joint: JointGraph) -> bool:
    """Whether forward and backward as written keep every rule of the verifier."""
    try:
        state = pipelines.split(pipelines.prepare(joint))
        assert state.forward is not None
        assert state.backward is not None
        verify(Split(joint=state.joint, forward=state.forward, backward=state.backward))
    except Exception:  # a pass may be what is broken; then nothing is asked of candidates
        return False
    return True

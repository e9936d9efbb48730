"""Search for the smallest graph that fails a test, by delta debugging over edits of the graph."""

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

#: Function that returns whether a graph still fails.
Test = Callable[[JointGraph], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """Result of reducing a joint graph that fails a test.

    Attributes:
        joint: the smallest graph found that still fails.
        before: number of nodes of the graph at the start, including placeholders and the output node.
        nodes: number of nodes of ``joint``.
        tests: number of calls of the test.
        interrupted: whether Ctrl-C ended the search.
    """

    joint: JointGraph
    before: int
    nodes: int
    tests: int
    interrupted: bool


def reduce(
    joint: JointGraph,
    test: Test,
    *,
    progress: Callable[[str], None] | None = None,
) -> Reduced:
    """Remove and simplify nodes of a joint graph while the graph still fails a test.

    The search ends when no single edit gives a smaller graph that still fails the test. Every graph
    that is tested is a valid joint graph, and was written as text and read back. Every graph that
    is tested can be split into forward and backward, unless ``joint`` itself cannot. The order of
    candidate graphs is the same in every run, and no graph is tested twice.

    Args:
        joint: the graph; it is not changed.
        test: returns True if a graph still fails. Exceptions of the test are not caught. A test for
            an exception must catch the exception, and return whether it is the expected one.
        progress: called with a line of text before each candidate graph.

    Returns:
        A `Reduced` with the smallest graph found. Ctrl-C ends the search with the smallest graph so far.

    Raises:
        ProblemError: the graph does not fail at the start, or cannot be written as text.
    """
    registry().learn_operators()
    search = _Search(joint, test, progress or (lambda _: None))
    start, interrupted = search.best, False
    if not search.fails(start, search.text):
        raise ProblemError(
            f"graph '{joint.name}' does not fail: the test is to say so of the graph as it is. A "
            "Python function returns True where it fails, a command ends with an exit code other "
            "than 0"
        )
    try:
        search.minimise()
    except KeyboardInterrupt:
        interrupted = True
    return Reduced(
        joint=search.best,
        before=len(start.graph.nodes),
        nodes=len(search.best.graph.nodes),
        tests=search.tests,
        interrupted=interrupted,
    )


class _Search:
    """One search for the smallest graph that fails a test; ``best`` is the smallest graph found so far."""

    def __init__(self, joint: JointGraph, test: Test, progress: Callable[[str], None]) -> None:
        self._test = test
        self._progress = progress
        self._seen: dict[bytes, bool] = {}
        self.tests = 0
        self.text = print_joint(joint)
        self.best = parse_joint(self.text)
        # If the graph cannot be split, that may be the failure itself. Candidates then need not be splittable either.
        self._splits = _split_is_legal(self.best)

    def minimise(self) -> None:
        """Apply all edits in rounds, until a whole round of edits leaves the graph unchanged."""
        changed = True
        while changed:
            changed = False
            for edit in EDITS:
                changed |= self._apply(edit)

    def _apply(self, edit: GraphEdit) -> bool:
        """Try one edit at all places, then at ever smaller groups of places; return whether the graph got smaller."""
        changed = False
        # Large groups first: one test may then accept the edit of many items.
        size = len(edit.items(self.best))
        while size:
            at = 0
            while at < len(items := edit.items(self.best)):
                if self._accept(edit, items[at : at + size]):
                    changed = True  # other items are now at position `at`, so it does not advance
                else:
                    at += size
            size //= 2
        return changed

    def _accept(self, edit: GraphEdit, items: list[Item]) -> bool:
        """Apply an edit to some items; keep the new graph and return True if it is valid, smaller and still fails."""
        nodes = len(self.best.graph.nodes)
        self._progress(f"{edit.name}: {nodes} nodes, {self.tests} tests")
        try:
            # A copy, because an edit changes its graph in place, and the result may be refused.
            candidate = tidy(edit.apply(self.best.copy(), items))
            # An invalid candidate gets the old text, and is refused like an unchanged graph.
            text = print_joint(candidate) if fault_of(candidate) is None else self.text
            if text == self.text:
                return False
            read = parse_joint(text)
        except RematError:  # the graph cannot be written as text, or read back
            return False
        if _measure(read) >= _measure(self.best) or not self.fails(read, text):
            return False
        self.best, self.text = read, text
        return True

    def fails(self, joint: JointGraph, text: str) -> bool:
        """Return whether a graph still fails the test; the test's results are cached by the graph's text."""
        key = hashlib.sha256(text.encode()).digest()
        if key not in self._seen:
            # A graph that cannot be split counts as not failing, if the first graph could be split.
            is_tested = not self._splits or _split_is_legal(joint)
            self.tests += is_tested
            self._seen[key] = is_tested and self._test(
                joint.copy()
            )  # the test may change its graph
        return self._seen[key]


def _measure(joint: JointGraph) -> tuple[int, int, int, int]:
    """Return the size of a graph as a tuple; every accepted edit lowers the size, so that the search ends."""
    nodes = list(joint.graph.nodes)
    # The number of calls comes first in the tuple, because an edit may add inputs in order to remove calls.
    calls = sum(n.op != "placeholder" for n in nodes)
    tags = sum(n.meta.get("recompute") is not None for n in nodes)
    read = sum(len(n.users) > 0 for n in nodes if n.op == "placeholder")
    edges = sum(len(n.all_input_nodes) for n in nodes)
    return calls, len(nodes), read, len(outputs_of(joint.graph)) + tags + edges


def _split_is_legal(joint: JointGraph) -> bool:
    """Whether remat's passes split a graph into forward and backward graphs that the verifier accepts."""
    try:
        state = pipelines.split(pipelines.prepare(joint))
        assert state.forward is not None
        assert state.backward is not None
        verify(Split(joint=state.joint, forward=state.forward, backward=state.backward))
    except Exception:  # the failure that is being reduced may be an error of a pass
        return False
    return True

"""Which tests run a line, and pytest in a process of its own: for `benchmarks/mutants.py`."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

Row = dict[str, Any]


class Watch:
    """The plugin that orders pytest about: no luck, no shrinking, and which test runs what line."""

    def __init__(self, lines: coverage.Coverage | None = None, modules: Sequence[str] = ()) -> None:
        self.lines, self.modules = lines, modules
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # pytest wants to import it itself.

        phases, usual = (Phase.explicit, Phase.generate), settings.get_profile("remat")
        options = {"derandomize": True, "database": None, "phases": phases}
        settings.register_profile("mutants", usual, **options)
        settings.load_profile("mutants")

    def pytest_sessionstart(self) -> None:
        for module in self.modules:
            __import__(module)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.lines:
            self.lines.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed or (report.skipped and self.lines):
            self.failed.append(report.nodeid)


def in_fork(tree: Path, job: Callable[[], object], log: Path, seconds: float) -> int | None:
    """Runs ``job`` in a process of its own, in ``tree``; its exit status, or None when it was killed."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        terminal = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        status = 99
        try:
            status = int(job())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_with_coverage(
    tree: Path, names: Sequence[str], folders: Sequence[str], output: Path
) -> int:
    """Runs the tests; writes how long each took and the tests of each line."""
    lines = coverage.Coverage(data_file=None, include=[f"{tree}/{name}" for name in names])
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names
    ]
    watch = Watch(lines, modules)
    lines.start()
    pytest.main(["-q", "-p", "no:cacheprovider", *folders], [watch])
    lines.stop()
    passed = watch.seconds.keys() - set(watch.failed)
    found = {
        name: {
            line: [test for test in tests if test == "" or test in passed]
            for line, tests in lines.get_data().contexts_by_lineno(f"{tree}/{name}").items()
        }
        for name in names
    }
    seconds = {test: watch.seconds[test] for test in sorted(passed)}
    output.write_text(json.dumps({"seconds": seconds, "lines": found}))
    return 0


def statements(code: str, line: int) -> Iterator[tuple[int, int]]:
    """First and last line of the statement at a line, and of what holds it, from inside out."""
    spans = [(1, code.count("\n") + 1)]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            body = getattr(node, "body", None)
            head = max(first, body[0].lineno - 1) if body else node.end_lineno
            if first <= line <= head:
                spans += [(first, node.end_lineno), (first, head)]
    yield from reversed(spans)


def tests_of(tree: Path, row: Row, seen: Row, limit: float) -> list[str]:
    """The tests that run a mutant's statement, the first case of each before the second.

    What runs only when the file is imported (``""``) is judged by the tests that run the rest of the
    definition, or of the file; in a file without functions by the tests of the room.
    """
    lines = {int(line): set(tests) for line, tests in seen["lines"][row["file"]].items()}
    for first, last in statements((tree / row["file"]).read_text(), row["line"]):
        found = set().union(*(lines.get(line, ()) for line in range(first, last + 1)))
        if found != {""}:
            break
    else:
        folder = row["room"].replace("remat", "tests")
        found = {test for test in seen["seconds"] if test.startswith(folder)}
    cases: Counter[str] = Counter()
    ordered = []
    for seconds, test in sorted((seen["seconds"][test], test) for test in found - {""}):
        cases[test.partition("[")[0]] += 1
        ordered.append((cases[test.partition("[")[0]], seconds, test))
    ordered.sort()
    total = list(itertools.accumulate(seconds for _, seconds, _ in ordered))
    return [test for at, (*_, test) in enumerate(ordered) if at == 0 or total[at] <= limit]

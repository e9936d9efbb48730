"""Small faults planted in the solvers, passes and graphs, and how many of them the tests find.

    make mutants ARGS="[--count N] [--tree DIR] [--like FILE] [--output FILE]"

A mutant is one change of one line by an operator of cosmic-ray: ``<`` becomes ``<=``, ``and`` becomes
``or``, a loop does not run. Annotations are left alone, for nothing evaluates them. Lines are drawn at
random with a fixed seed, as many of each room as it has, and one mutant of each line.

The tests run once under coverage, which says what tests run a line. Those tests then judge the line's
mutants, the quickest first, as far as they took no more than ``--seconds`` in total. Each mutant gets a
process of its own, forked from one that has imported torch but not remat, in a copy of the tree that
holds the mutated file.

Outcomes: ``caught`` (a test fails), ``timed out`` (also caught: the mutant runs for ever), ``survived``
and ``not reached`` (none of the tests runs the line). Where the output file exists already, only its
mutants without an outcome run, with ``--again`` those that were not caught too; what somebody has written
under ``why`` stays. ``--like`` takes the mutants of another record, wherever a file of the tree has the
same line, and draws the others.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.mutant_tests import Row, Watch, in_fork, run_with_coverage, tests_of

HERE = Path(__file__).resolve().parents[1]
ROOMS = ("remat/solvers", "remat/passes", "remat/graph")
#: What judges the mutants: not what compiles with Inductor, nor whole models.
TESTS = "solvers passes graph planning running plugins testing"
#: How many times as long as under coverage the tests may run, before they count as running for ever.
PATIENCE = 5
SEED = 12
#: Operators that must be told which variables to exchange.
WITH_ARGUMENTS = ("VariableReplacer", "VariableInserter")


@functools.cache
def mutants(path: Path) -> dict[int, list[tuple[str, int]]]:
    """The mutants of a file by line: the operator, and which of its mutants in the file it is."""
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    code, provider = path.read_text(), OperatorProvider()
    nodes, annotations = list(ast_nodes(get_ast(code))), list(annotated(code))
    for name in provider:
        if name in WITH_ARGUMENTS:
            continue
        places = map(provider[name]().mutation_positions, nodes)
        for number, (start, _) in enumerate(itertools.chain.from_iterable(places)):
            if not any(first <= start < last for first, last in annotations):
                found[start[0]].append((name, number))
    return found


def annotated(code: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end: line and column."""
    for parent in ast.walk(ast.parse(code)):
        for field in ("annotation", "returns"):
            if node := getattr(parent, field, None):
                yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def lines_of(tree: Path, name: str) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1."""
    yield from enumerate((tree / name).read_text().split("\n"), 1)


def draw(tree: Path, files: dict[str, str], count: int) -> Iterator[Row]:
    """Draws ``count`` mutants, spread over the rooms by lines and over a room's lines evenly."""
    lines = [(files[name], name, *line) for name in files for line in lines_of(tree, name)]
    for room in ROOMS:
        dice, drawn = random.Random(f"{SEED} {room}"), [line for line in lines if line[0] == room]
        wanted = math.ceil(count * len(drawn) / len(lines))
        dice.shuffle(drawn)
        for _, name, at, text in drawn:
            if wanted and (found := mutants(tree / name).get(at)):
                operator, number = dice.choice(found)
                nth = [other for same, other in found if same == operator].index(number)
                place = {"room": room, "file": name, "line": at, "text": text.strip()}
                row = {**place, "operator": operator, "nth": nth, "outcome": None}
                # What Python or our settings refuse to compile would be caught without a test.
                with contextlib.suppress(SyntaxError), warnings.catch_warnings(action="error"):
                    compile(mutated(tree, row), name, "exec")
                    wanted -= 1
                    yield row


def mutated(tree: Path, row: Row) -> str:
    """The text of the file with the mutant."""
    path = tree / row["file"]
    number = numbers(path, row["line"], row)[row["nth"]]
    return mutate_code(path.read_text(), OperatorProvider()[row["operator"]](), number)


def find(tree: Path, row: Row, names: Sequence[str]) -> Row | None:
    """The same mutant in this tree: the line of the same text that is nearest to where it was."""
    found = [
        (abs(at - row["line"]), name, at)
        for name in names
        for at, text in lines_of(tree, name)
        if text.strip() == row["text"] and len(numbers(tree / name, at, row)) > row["nth"]
    ]
    return {**row, "file": min(found)[1], "line": min(found)[2]} if found else None


def numbers(path: Path, line: int, row: Row) -> list[int]:
    """Which mutants of the row's operator in the file are on this line."""
    return [number for name, number in mutants(path).get(line, ()) if name == row["operator"]]


def files_of(tree: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The rooms of the tree's files, by where they lie today; and the files of each file of today."""
    rooms: dict[str, str] = {}
    before: dict[str, list[str]] = defaultdict(list)
    for path in sorted((tree / "remat").rglob("*.py")):
        name = path.relative_to(tree).as_posix()
        before[name].append(name)
        room = "/".join(name.split("/")[:2])
        if room in ROOMS:
            rooms[name] = room
    return rooms, before


def judge(tree: Path, row: Row, tests: Sequence[str], limit: float, log: Path) -> None:
    """Plants a mutant, runs its tests and writes the outcome into ``row``."""
    path = tree / row["file"]
    code, stat, changed = path.read_text(), path.stat(), mutated(tree, row)
    lines = zip(code.split("\n"), changed.split("\n"), strict=False)
    differs = [new.strip() for old, new in lines if old != new]
    row.update(mutated=(differs or [""])[0], tests=len(tests))
    row.pop("by", None)
    if not tests:
        row["outcome"] = "not reached"
        return

    def run() -> int:
        # Python takes no compiled file of another time for this one's, and writes none.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        return pytest.main(["-xq", "-p", "no:cacheprovider", "--tb=short", *tests], [Watch()])

    try:
        path.write_text(changed)
        os.utime(path, (stat.st_mtime + 1000, stat.st_mtime + 1000))
        status = in_fork(tree, run, log, 60 + PATIENCE * limit)
    finally:
        path.write_text(code)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    row["outcome"] = {None: "timed out", 0: "survived"}.get(status, "caught")
    if row["outcome"] == "caught":
        row.pop("why", None)
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", log.read_text(), re.MULTILINE)
        row["by"] = failed[1] if failed else f"pytest ends with {status}"


def summarise(rows: Sequence[Row]) -> dict[str, Row]:
    """How many mutants had what outcome, and the share that was caught, by room and together."""
    counts = {}
    for room in (*ROOMS, "all"):
        outcomes = Counter(row["outcome"] for row in rows if room in (row["room"], "all"))
        caught = outcomes["caught"] + outcomes["timed out"]
        counts[room] = {**outcomes, "rate": round(caught / max(1, outcomes.total()), 3)}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="run what was not caught once more")
    parser.add_argument("--count", type=int, default=210)
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout to judge")
    parser.add_argument("--like", type=Path, help="a record whose mutants to take where they exist")
    parser.add_argument("--seconds", type=float, default=20, help="for the tests of one mutant")
    parser.add_argument("--tests", default=TESTS, help="folders and files of tests/")
    parser.add_argument("--lines", type=Path, help="keep what test runs what line here")
    parser.add_argument("--output", type=Path, default=HERE / "benchmarks/results/mutants.json")
    options = parser.parse_args()
    head = ["git", "-C", str(options.tree), "rev-parse", "--short", "HEAD"]
    record: Row = {
        "benchmark": "mutants",
        "commit": subprocess.check_output(head, text=True).strip(),
        "seed": SEED,
        "tests": options.tests,
    }
    folder = tempfile.TemporaryDirectory(prefix="mutants-")
    scratch = Path(folder.name)
    tree, log = scratch / "tree", scratch / "log.txt"
    shutil.copytree(
        options.tree, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__")
    )
    rooms, before = files_of(tree)

    if options.output.exists():
        rows = json.loads(options.output.read_text())["mutants"]
        rows = [row for old in rows if (row := find(tree, old, [old["file"]]))]
    else:
        model = json.loads(options.like.read_text())["mutants"] if options.like else []
        fresh = {"outcome": None, "like": True}
        plain = [{k: v for k, v in row.items() if k not in ("by", "why")} | fresh for row in model]
        alike = [row for old in plain if (row := find(tree, old, before.get(old["file"], [])))]
        rows = alike
        for room in ROOMS:
            same = [row for row in alike if row["room"] == room]
            drawn = [row for row in draw(tree, rooms, options.count) if row["room"] == room]
            rows = rows + drawn[: max(0, len(drawn) - len(same))]

    done = ("caught", "timed out", *(() if options.again else ("survived", "not reached")))
    if all(row["outcome"] in done for row in rows):
        parser.error(f"all of {options.output} is done: remove it, or pass --again or --output")

    # What every test needs and what takes long to import; nothing of remat.
    import networkx, ortools.sat.python.cp_model, pulp, scipy.optimize, torch._dynamo  # noqa: E401, F401, I001
    import torch._functorch.partitioners  # noqa: F401

    assert "remat" not in sys.modules
    lines = options.lines or scratch / "lines.json"
    if not lines.exists():
        folders = [f"tests/{name}" for name in options.tests.split()]
        in_fork(tree, lambda: run_with_coverage(tree, list(rooms), folders, lines), log, 7200)
        print(log.read_text().rstrip().rpartition("\n")[2], flush=True)
    seen = json.loads(lines.read_text())
    for row in rows:
        if row["outcome"] in done:
            continue
        start = time.monotonic()
        judge(tree, row, tests_of(tree, row, seen, options.seconds), options.seconds, log)
        print(f"{row['outcome']:11} {row['file']}:{row['line']} {row['operator']}", end=" ")
        print(f"{row['mutated']} ({time.monotonic() - start:.0f} s)", flush=True)
        whole = {**record, "counts": summarise(rows), "mutants": rows}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(summarise(rows), indent=1))


if __name__ == "__main__":
    main()

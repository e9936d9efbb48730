"""Small faults planted in the solvers, passes and graphs, and how many of them the tests find: ``make mutants``.

A mutant is one change of one line by an operator of cosmic-ray: ``<`` becomes ``<=``, ``and`` becomes ``or``, a loop does
not run. cosmic-ray lists all mutants of a room and runs the tests of each; this script draws some of them, as many of each room as
it has, with a fixed seed, and writes the outcomes down. A copy of the tree is mutated. The tests of a room are the quick
ones of its folder.

The kept `results/mutants.json` is of an earlier runner: other mutants, judged by the tests of seven folders.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult

from benchmarks.tables import RESULTS

HERE = Path(__file__).resolve().parents[1]
ROOMS = ("solvers", "passes", "graph")
SEED = 12
TIMEOUT_S = 300.0  # of the tests of a mutant


def annotations(path: Path) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end: nothing evaluates them, so no test can find a fault there."""
    for parent in ast.walk(ast.parse(path.read_text())):
        for field in ("annotation", "returns"):
            if node := getattr(parent, field, None):
                yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def drawn(items: list[WorkItem], count: int, room: str) -> set[str]:
    """Job ids of as many mutants, each of another line and none in an annotation."""
    dice = random.Random(f"{SEED} {room}")
    by_line: dict[tuple[Path, int], list[WorkItem]] = {}
    places = {path: list(annotations(path)) for path in {i.mutations[0].module_path for i in items}}
    for item in items:
        mutation = item.mutations[0]
        spans = places[mutation.module_path]
        if not any(first <= mutation.start_pos < last for first, last in spans):
            line = mutation.module_path, mutation.start_pos[0]
            by_line.setdefault(line, []).append(item)
    lines = dice.sample(sorted(by_line), min(count, len(by_line)))
    # Job ids are random; operators and occurrences are not.
    ordered = (sorted(by_line[line], key=lambda i: str(i.mutations[0])) for line in lines)
    return {dice.choice(choices).job_id for choices in ordered}


def run_room(room: str, count: int, session: Path) -> list[dict[str, Any]]:
    """Plants mutants in a room, in the current folder, and returns a row for each."""
    tests = f"{sys.executable} -m pytest -xq -p no:cacheprovider --hypothesis-seed=0 -m 'not slow' tests/{room}"
    config = ConfigDict(
        {"test-command": tests, "timeout": TIMEOUT_S, "distributor": {"name": "local"}}
    )
    paths = sorted(Path("remat", room).rglob("*.py"))
    with use_db(str(session), WorkDB.Mode.create) as db:
        init(paths, db, {})
        items = list(db.work_items)
        wanted = drawn(items, count, room)
        left_out = [item.job_id for item in items if item.job_id not in wanted]
        db.set_multiple_results(left_out, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        execute(db, config)
        results = {job: result for job, result in db.results if job in wanted}
    return [
        {
            "room": room,
            "file": str(item.mutations[0].module_path),
            "line": item.mutations[0].start_pos[0],
            "operator": item.mutations[0].operator_name,
            "outcome": "caught" if results[item.job_id].is_killed else "survived",
            "diff": results[item.job_id].diff,
        }
        for item in items
        if item.job_id in results
    ]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mutants by outcome, and the share that was caught, by room and together."""
    counts = {}
    for room in (*ROOMS, "all"):
        outcomes = Counter(row["outcome"] for row in rows if room in (row["room"], "all"))
        counts[room] = {**outcomes, "rate": round(outcomes["caught"] / max(1, outcomes.total()), 3)}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=210, help="mutants of all rooms together")
    parser.add_argument("--quick", action="store_true", help="one mutant of the smallest room")
    options = parser.parse_args()
    output = RESULTS / f"mutants_of_rooms{'.quick' if options.quick else ''}.json"
    sizes = {room: len(list((HERE / "remat" / room).rglob("*.py"))) for room in ROOMS}
    counts = {
        room: round(options.count * size / sum(sizes.values())) for room, size in sizes.items()
    }
    if options.quick:
        counts = {min(ROOMS, key=lambda room: sizes[room]): 1}
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(command, text=True).strip()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build")
        shutil.copytree(HERE, tree, ignore=ignored)
        os.chdir(tree)
        # Python takes no compiled file of another time for a mutant's, and the tests import this tree.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
        for room, count in counts.items():
            rows += run_room(room, count, Path(folder) / f"{room}.sqlite")
            record = {"benchmark": "mutants", "commit": commit, "seed": SEED}
            record |= {"counts": summarise(rows), "mutants": rows}
            output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(summarise(rows), indent=1))
    print(f"written to {output}", file=sys.stderr)


if __name__ == "__main__":
    main()

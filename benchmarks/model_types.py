"""Model types of `transformers`, trained under ``torch.compile(backend="remat")``: which work, and how.

    python -m benchmarks.model_types [--quick] [--only TYPE,…] [--lower eager,inductor] [--json FILE]
                                     [--jobs 1] [--show]

Every type of `model_type_recipes`, with dropout, by both lowerings, with static shapes (two batches
of one size) and with dynamic shapes (two batches of different sizes), at budgets 1, 0.5 and 0.2 (under
Inductor at 0.5). A case is two steps of forward, loss, backward and SGD; outputs, all gradients, buffers
and the state of the generator are compared with eager PyTorch's from the same seeds, and under the
eager lowering all budgets must agree bit for bit. A case that raises is a result with its reason.
PyTorch without us (``aot_eager``, ``inductor``) does the same under the eager lowering with static
shapes, and elsewhere where ours raised, was wrong, or compiled anew for the second batch.

Each type and lowering has a process of its own. Seconds are those of the first step, compilation
included, from an empty cache of Inductor's; the table shows those of the processors, the C++
compiler's with them, which other work on the machine stretches less than the clock's (both are in the
file, with the load). With ``--only`` or ``--lower`` the figures of those named replace theirs in the
file and the rest stays; the file is written after every process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import model_type_tables as tables
from benchmarks.machine import describe_cpu
from benchmarks.model_type_recipes import RECIPES, make

RESULTS = Path(__file__).parent / "results" / "model_types.json"
ROOT = Path(__file__).parents[1]
#: Budgets of a lowering; None is PyTorch without us. Budget 1 comes first: the others must equal it.
BUDGETS: dict[str, tuple[float | None, ...]] = {
    "eager": (1.0, 0.5, 0.2, None),
    "inductor": (0.5, None),
}
SHAPES = ("static", "dynamic")
QUICK = ("llama", "qwen3_moe", "t5", "resnet", "mamba2")
#: Seconds after which the process of a type and lowering counts as hanging.
LIMIT_S = 3600


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few types, no Inductor")
    parser.add_argument("--only", default="", help="types, separated by commas")
    parser.add_argument("--lower", default="", help="eager, inductor, or both (default)")
    parser.add_argument("--json", type=Path, default=None, help=f"default {RESULTS}")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument(
        "--show", action="store_true", help="print what the file holds; run nothing"
    )
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_here(*given.case)
        return
    names = given.only.split(",") if given.only else list(QUICK if given.quick else RECIPES)
    lowerings = (given.lower or ("eager" if given.quick else "eager,inductor")).split(",")
    for what, asked, known in (("--only", names, RECIPES), ("--lower", lowerings, BUDGETS)):
        if unknown := [n for n in asked if n not in known]:
            parser.error(f"{what} names {', '.join(unknown)}; there are {', '.join(known)}")
    path = given.json or (RESULTS.with_suffix(".quick.json") if given.quick else RESULTS)
    console = Console(width=None if sys.stdout.isatty() else 132)
    record = Record(path, whole=not (given.only or given.lower or given.show))
    if not given.show:
        cases = [(name, lower) for lower in lowerings for name in names]
        run_all(cases, record, given.jobs, console)
    for lower in BUDGETS:
        if rows := record.rows(lower):
            console.print(tables.table(rows, lower))
    for line in tables.failures(record.data["types"]):
        console.print(line, highlight=False)
    console.print(tables.summary(record.data["types"]), highlight=False)
    console.print(f"written to {path}")
    if tables.ours_alone(record.data["types"]):
        raise SystemExit(1)


class Record:
    """The file of results, kept up to date."""

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {"types": {}}
        if path.exists() and not whole:
            self.data = json.loads(path.read_text())

    def add(self, name: str, lower: str, measured: dict[str, Any]) -> None:
        import torch

        import remat

        of_type = self.data["types"].setdefault(name, {})
        of_type[lower] = measured
        types = {n: self.data["types"][n] for n in RECIPES if n in self.data["types"]}
        self.data = {
            "benchmark": "model_types",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "remat": remat.__version__,
            "cpu": describe_cpu(),
            "cores": os.cpu_count(),
            "times": "first_cpu_s: processor seconds, compilers included; the others: wall seconds, on a "
            "machine that other work loads as well (load_average: before and after)",
            "limits": tables.LIMIT,
            "types": types,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)

    def rows(self, lower: str) -> dict[str, dict[str, Any]]:
        return {n: t[lower] for n, t in self.data["types"].items() if lower in t}


def run_all(cases: Sequence[tuple[str, str]], record: Record, jobs: int, console: Console) -> None:
    """Runs every type and lowering in a process of its own and writes down what it says."""
    done = 0
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("")) if sys.stdout.isatty() else None
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        running = {pool.submit(run_apart, *case): case for case in cases}
        for future in as_completed(running):
            name, lower = running[future]
            record.add(name, lower, future.result())
            done += 1
            if status is not None:
                status.update(f"{done} of {len(cases)}; last {name}, {lower}")


def run_apart(name: str, lower: str) -> dict[str, Any]:
    """One type and lowering in a process of its own.

    Returns:
        Its results as far as it came, with what ended it if that was not the end.
    """
    start, load = time.perf_counter(), os.getloadavg()[0]
    command = [sys.executable, "-m", "benchmarks.model_types", "--case", name, lower]
    # Kernels are compiled one after another by children of the process, so that it sees their time.
    # One thread is enough for models of this size, and does not wait for another beside other work.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    measured: dict[str, Any] = {"rows": []}
    ended = None
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        said, errors = done.stdout, done.stderr
        if done.returncode != 0:
            last = errors.strip().splitlines()[-1:] or ["without a message"]
            ended = f"exit status {done.returncode}: {last[0][:300]}"
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        ended = f"not done after {LIMIT_S} s"
    for line in said.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            if "shapes" in found:
                measured["rows"].append(found)
            else:
                measured |= found
    known = {(r["shapes"], r["budget"]) for r in measured["rows"]}
    if ended is not None:
        at = next((c for c in ways(lower) if c not in known), (SHAPES[-1], None))
        measured["rows"].append(
            {"lower": lower, "shapes": at[0], "budget": at[1], "failed": ended, "wrong": False}
        )
    measured["elapsed_s"] = round(time.perf_counter() - start, 1)
    measured["load_average"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    return measured


def ways(lower: str) -> Iterator[tuple[str, float | None]]:
    """Shapes and budgets of a lowering, in the order in which they run."""
    for shapes in SHAPES:
        for budget in BUDGETS[lower]:
            yield shapes, budget


def run_here(name: str, lower: str) -> None:
    """Runs all cases of a type and lowering in this process; each is a line of JSON when it is done."""
    import torch
    from torch._inductor.utils import fresh_cache

    from benchmarks.model_type_steps import Bench, Case

    warnings.simplefilter("ignore")
    say(warm_up_s=warm_up(lower))
    built = make(name)
    bench = Bench(built)
    say(
        title=built.title,
        parameters=sum(p.numel() for p in built.model.parameters()),
        random=bench.is_random(),
        threads=torch.get_num_threads(),
    )
    bad: dict[str, int] = dict.fromkeys(SHAPES, 0)
    for shapes, budget in ways(lower):
        if budget is None and not bad[shapes] and (lower, shapes) != ("eager", "static"):
            continue
        with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=False):
            result = bench.run(Case(lower=lower, shapes=shapes, budget=budget))
        bad[shapes] += result.wrong or result.failed is not None or result.again > 0
        say(**asdict(result), wrong=result.wrong)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def warm_up(lower: str) -> float:
    """Compiles something small, so that no case pays for imports and for precompiled headers."""
    import torch

    import remat

    start = time.perf_counter()
    known = len(remat.plans())
    layer = torch.nn.Linear(8, 8)
    step = torch.compile(layer, backend="remat", options={"lower": lower})
    step(torch.ones(8, 8)).sin().sum().backward()
    if len(remat.plans()) == known:
        raise SystemExit("a linear layer did not run on a plan of ours")
    return round(time.perf_counter() - start, 1)


if __name__ == "__main__":
    main()

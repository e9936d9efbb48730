"""Fuzzing from a terminal: ``make fuzz``, ``make fuzz N=200 SEED=7``."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
import time
from collections import Counter

from tests.fuzz.fuzzing import PORTION, TRACED, WHOLE, Portion, begin_worker, run_portion
from tests.fuzz.lines import TABLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("-n", type=int, default=5000, help="programs (default: 5000)")
    parser.add_argument("--seed", type=int, help="number of the first portion (default: any)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--no-shrink", action="store_true", help="show what fails as it is drawn")
    parser.add_argument("--whole", action="store_true", help="whole steps alone")
    parser.add_argument(
        "--lower",
        default="eager",
        choices=("eager", "inductor"),
        help="the lowering of whole steps",
    )
    given = parser.parse_args()
    first = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    portions = range(first, first + max(1, -(-given.n // PORTION)))
    print(f"{len(portions)} portions of {PORTION} programs, SEED={first}", flush=True)
    begun, seen, written = time.monotonic(), Counter[str](), Counter[str]()
    different = faults = 0
    run = functools.partial(
        run_portion,
        traced=0 if given.whole else TRACED,
        whole=PORTION if given.whole else WHOLE,
        lower=given.lower,
        shrink=not given.no_shrink,
    )
    context = multiprocessing.get_context("spawn")
    # What tracing leaves behind in a process adds up.
    with context.Pool(given.jobs, begin_worker, maxtasksperchild=10) as pool:
        for done, portion in enumerate(pool.imap_unordered(run, portions), 1):
            seen += portion.seen
            written += portion.written
            different += portion.different
            faults += portion.fault is not None
            report(portion, done, len(portions), time.monotonic() - begun)
    print("\n" + "\n".join(f"{count:8,}  {what}" for what, count in sorted(seen.items())))
    print(f"{different:8,}  different programs")
    never = [op.text for _, group in TABLE for op in group if not written[op.text]]
    print(f"operators never written: {', '.join(never) or 'none'}")
    print(f"{faults} portions failed" if faults else "nothing failed")
    return min(faults, 1)


def report(portion: Portion, done: int, total: int, elapsed_s: float) -> None:
    """Progress, in place on a terminal; a fault with what runs it again."""
    if portion.fault is not None:
        print(f"\n{portion.fault}\nagain: make fuzz N={PORTION} SEED={portion.number}", flush=True)
    line = f"{done} of {total} portions, {elapsed_s:.0f} s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif done % 10 == 0 or done == total:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

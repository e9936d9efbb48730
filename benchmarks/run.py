"""Runs benchmarks: ``python -m benchmarks.run peak-plans --quick``, or all of them: ``python -m benchmarks.run all``.

Each row of results is printed as a line of JSON when it is known. After each workload the file of the experiment
is written: a header, a summary and all rows. With ``--only``, the rows of the workloads that are named replace theirs,
and the rest of the file stays. ``--quick`` measures a small part, and writes a file of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import tables
from benchmarks.experiment import Case, Experiment, Row, measured, result_path, write_record

#: Where the experiments are: each is an entry of ``EXPERIMENTS`` of its module.
PLACES = {
    "gradients": ("gradients", "model-types"),
    "bare": ("bare",),
    "branch_values": ("branch-values", "branch-price", "branch-rounding"),
    "quality": ("plan-quality", "flops", "hand-written"),
    "partition": ("partition", "compile-time"),
    "complex_numbers": ("complex-numbers",),
    "frozen": ("frozen",),
    "ladders": ("ladders", "compiled-ladders"),
    "blocks": ("blocks",),
    "whole": ("whole-step", "whole-tags", "whole-compiled", "whole-time", "whole-inference"),
    "step": ("step",),
    "default": ("default",),
    "memory": ("peak", "compiled-memory", "fit", "hooks"),
    "networks": ("networks",),
    "plans": ("peak-plans", "large-steps", "schedules", "frontier", "offloading", "explorer"),
    "chunks": ("chunked-loss",),
    "reports": ("reports", "report-steps"),
    "sac": ("sac",),
    "small": ("small",),
    "solvers": ("solvers",),
}
#: The module of each experiment.
MODULES = {name: module for module, names in PLACES.items() for name in names}


def experiment_of(name: str) -> Experiment:
    """An experiment by its name; imports its module."""
    module = importlib.import_module(f"benchmarks.{MODULES[name]}")
    found: Experiment = module.EXPERIMENTS[name]
    own = tuple({name} & tables.TABLES.keys())
    return replace(found, name=name, tables=found.tables or own)


def parser_of(about: str) -> argparse.ArgumentParser:
    """What every command of the benchmarks takes."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small part of it")
    parser.add_argument("--only", default="", help="workloads, separated by commas")
    parser.add_argument("--budgets", default="", help="instead of the experiment's own")
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--show", action="store_true", help="print the tables; measure nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("experiment", choices=(*MODULES, "all"), metavar="EXPERIMENT")
    parser.epilog = "experiments: " + ", ".join(MODULES)
    options = parser.parse_args(arguments)
    if options.experiment == "all" and options.json:
        parser.error("--json names the file of one experiment")
    names = list(MODULES) if options.experiment == "all" else [options.experiment]
    failed = [name for name in names if not run(experiment_of(name), options, parser)]
    if failed:
        print(f"not as it should be: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(
    experiment: Experiment, options: argparse.Namespace, parser: argparse.ArgumentParser
) -> bool:
    """Runs one experiment; returns whether everything is as it should be."""
    path = options.json or result_path(experiment, quick=options.quick)
    print(f"{experiment.name}: {experiment.about}", file=sys.stderr)
    if options.show:
        show(experiment, json.loads(path.read_text()))
        return True
    cases = chosen(experiment, options, parser)
    workloads = dict.fromkeys(case.workload for case in cases)
    rows: list[Row] = json.loads(path.read_text())["rows"] if options.only and path.exists() else []
    record: Row = {}
    missed: list[str] = []
    for workload in workloads:
        own = [case for case in cases if case.workload == workload]
        try:
            found = list(measured(experiment, own, quick=options.quick))
        except Exception as error:  # one workload less; the others are measured
            traceback.print_exc()
            missed.append(f"{workload}: {error!r}")
            continue
        rows = [row for row in rows if row["workload"] != workload] + found
        record = write_record(path, experiment, rows)
    if record:
        show(experiment, record)
        missed += experiment.missed(record["summary"])
        print(f"written to {path}", file=sys.stderr)
    for what in missed:
        print(what, file=sys.stderr)
    return not missed


def chosen(
    experiment: Experiment, options: argparse.Namespace, parser: argparse.ArgumentParser
) -> list[Case]:
    """The cases that the options ask for."""
    cases = list(experiment.quick if options.quick and not options.only else experiment.cases)
    asked = [name for name in options.only.split(",") if name]
    known = list(dict.fromkeys(case.workload for case in cases))
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"--only: there is no '{unknown[0]}'; known: {', '.join(known)}")
    if asked:
        cases = [case for case in cases if case.workload in asked]
    if options.budgets and any(case.budget is None for case in cases):
        parser.error(f"--budgets: {experiment.name} has its own")
    if options.budgets:
        budgets = [float(text) for text in options.budgets.split(",")]
        cases = list(dict.fromkeys(replace(c, budget=b) for c in cases for b in budgets))
    return cases


def show(experiment: Experiment, record: Row) -> None:
    """Prints the summary and the tables of an experiment."""
    if record["summary"]:
        print(json.dumps({"summary": record["summary"]}, indent=1))
    for name in experiment.tables:
        print()
        print(tables.TABLES[name](tables.Kept({experiment.name: record})), end="")


if __name__ == "__main__":
    sys.exit(main())

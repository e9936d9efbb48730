"""The command ``remat repro``: run a recorded failure again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remat.cli import params
from remat.cli.commands import json_option, main
from remat.cli.output import as_json
from remat.cli.progress import Progress

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.instruments.reproducer import Failure
    from remat.planning.pipelines import PassManager

#: Exit codes: no failure, the recorded failure, another failure. 2 is left out, because it means wrong usage.
GONE, REPRODUCED, ANOTHER = 0, 1, 3


@main.command()
@click.argument(
    "folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--passes", type=params.PIPELINE, help="run this pipeline instead of the recorded one"
)
@json_option
def repro(folder: Path, passes: PassManager | None) -> None:
    """Run the failure recorded in a reproducer FOLDER again, and tell whether it still fails.

    Exit code: 0 no failure; 1 the recorded failure; 3 another failure.
    """
    from remat.cli.tables import show_figures
    from remat.graph.text import read_joint
    from remat.passes.instruments.reproducer import GRAPH, read_reproducer

    with Progress() as progress:
        progress.stage(f"reading {folder}")
        recorded = read_reproducer(folder)
        joint = read_joint(folder / GRAPH)
        progress.stage("running it again")
        error = replay(joint, recorded, passes)
    if error is None:
        outcome, code = "no longer fails", GONE
    elif recorded.is_same(error):
        outcome, code = "reproduced", REPRODUCED
    else:
        outcome, code = "fails in another way", ANOTHER
    shown = None if error is None else f"{type(error).__name__}: {params.one_line(error)}"
    data = {
        "outcome": outcome,
        "error": shown,
        "recorded": f"{recorded.type}: {params.one_line(recorded.message)}",
    }
    if not as_json(data):
        show_figures([data])
    click.get_current_context().exit(code)


def replay(
    joint: JointGraph, recorded: Failure, passes: PassManager | None = None
) -> Exception | None:
    """Plan a joint graph as in a recorded failure, which may change the graph; return the raised exception, or None."""
    from remat.passes.instruments import VerifyEach
    from remat.planning import pipelines
    from remat.planning.planner import plan_graph
    from remat.planning.request import PlanRequest

    try:
        options = json.loads(recorded.options)
        if passes is None and options:
            plan_graph(joint, PlanRequest.of(**options))
            return None
        manager = passes or pipelines.PassManager.parse(recorded.pipeline)
        if recorded.path:
            state = pipelines.initial_state(joint, in_place=True, count_outputs=False)
            checks = [VerifyEach(numbers=recorded.checks == "numbers")] if recorded.checks else []
            manager.run(state, in_place=True, instruments=checks)
        else:  # the failure came after all passes, when the plan was verified
            plan_graph(joint, PlanRequest.of(pipeline=manager), in_place=True)
    except Exception as error:  # any exception may be the recorded failure
        return error
    return None

"""The command ``remat opt``: read a joint graph, run passes over it, and print the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    Step,
    json_option,
    main,
    plan_options,
    planning_options,
    reads_step,
    tracing_options,
)
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.files import write_file

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.core.pipeline import Instrument, Pipeline

_FOLDER = click.Path(file_okay=False, path_type=Path)


@main.command()
@click.argument("model", metavar="JOINT", is_eager=True, callback=params.check_file)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--passes",
    type=params.PIPELINE,
    help="the pipeline, for example 'fixpoint(dce,cse),min-cut,partition'; by default the pipeline of plans, "
    "with the four options below",
)
@plan_options("budget", "solver", "cost", "time_limit")
@click.option(
    "-o",
    "--output",
    type=params.OutputFile(),
    help="write the graph to this file instead of to standard output",
)
@click.option("--print-pipeline", is_flag=True, help="print the pipeline")
@click.option("--print-before-all", is_flag=True, help="print the graph before every pass")
@click.option("--print-after-all", is_flag=True, help="print the graph after every pass")
@click.option(
    "--print-after", "only", metavar="PASS", multiple=True, help="print the graph after this pass"
)
@click.option("--print-changed", is_flag=True, help="print what each pass changed, as a diff")
@click.option("--dump-dir", type=_FOLDER, help="write the graph after every pass to this folder")
@click.option("--time-passes", is_flag=True, help="print the time and memory of each pass")
@click.option(
    "--statistics", is_flag=True, help="print the counts that passes report, summed by name"
)
@click.option(
    "--verify-each",
    type=click.Choice(["structure", "numbers"]),
    help="check the graph after every pass; with numbers also run the graphs on random inputs",
)
@click.option(
    "--opt-bisect-limit", type=int, metavar="N", help="leave out optional passes after the first N"
)
@click.option(
    "--repro-dir", type=_FOLDER, help="if a pass fails, write a reproducer to this folder"
)
@tracing_options
@json_option
@reads_step
def opt(step: Step, output: Path | None, **options: Any) -> None:
    """Run passes over JOINT and print the resulting graph.

    JOINT is a file of graph text from `remat capture MODEL -o FILE.joint`, a dash (-) for standard
    input, or a MODEL to capture. The resulting graph is the joint graph or, if a pass partitions
    it, the forward and backward graphs. Everything else is printed to standard error.
    """
    from remat.passes.instruments import OptBisect, Timing
    from remat.passes.instruments.printed import state_text
    from remat.planning import pipelines

    manager = _pipeline(options)
    instruments = [*_instruments(options)]
    with Progress() as progress:
        graph = read_graph(progress, step)
        progress.stage("running passes")
        if options["print_pipeline"]:
            _note(str(manager))
        state = pipelines.initial_state(graph, in_place=True, count_outputs=False)
        result = manager.run(state, in_place=True, instruments=instruments)
        progress.stage("printing the graph")
        text = state_text(result.state)
    if output is not None:
        write_file(output, text, "graph")
    if options["statistics"]:
        counts = (f"  {name}: {count}" for name, count in result.statistics.items())
        _note("\n".join(("statistics:", *counts)))
    reports: dict[str, Any] = {"timing": [], "bisect": []}
    for each in instruments:
        if isinstance(each, Timing):
            _note(f"time of passes:\n{each}")
            reports["timing"] = each.to_dict()
        elif isinstance(each, OptBisect):
            reports["bisect"] = each.lines
    data = {
        "graph": result.joint.name,
        "pipeline": str(manager),
        "modified": result.modified,
        "partitioned": result.forward is not None,
        "statistics": dict(result.statistics),
        **reports,
        "text": None if output else text,
    }
    if not as_json(data) and output is None:
        click.echo(text, nl=False)


def read_graph(progress: Progress, step: Step) -> JointGraph:
    """Return the joint graph that JOINT names: read the graph from a file or standard input, or capture a model."""
    from remat.graph.text import SUFFIX, parse_joint, read_joint
    from remat.graph.text.syntax import MAX_BYTES

    joint = step.model
    path = Path(joint)
    is_model = ":" in joint and path.suffix != SUFFIX and not path.is_file()
    if is_model:
        return step.capture(progress).joint
    if step.overrides:
        raise click.UsageError(
            f"'{step.overrides[0]}' is for hf:TYPE only: '{joint}' is graph text"
        )
    if joint == "-":
        data = sys.stdin.buffer.read(MAX_BYTES + 1)  # the parser refuses more than MAX_BYTES
        return parse_joint(data.decode(errors="replace"))
    if not path.exists():
        raise click.UsageError(
            f"there is no file '{path}'; expected a file of graph text such as step{SUFFIX}, - or MODEL"
        )
    progress.stage(f"reading {joint}")
    return read_joint(path)


def _pipeline(options: dict[str, Any]) -> Pipeline:
    """Remove ``--passes`` and the options of planning from ``options``; return the pipeline that they describe."""
    from remat.planning.request import PlanRequest

    given: Pipeline | None = options.pop("passes")
    context = click.get_current_context()
    planning = planning_options(options)
    request = PlanRequest.of(**planning)
    if given is None:
        return request.as_pipeline()
    for name in planning:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            example = PlanRequest.of(budget=0.3).as_pipeline()
            raise click.UsageError(
                f"'--{name.replace('_', '-')}' is for the default pipeline; in --passes it is an "
                f"option of the pass that decides, for example '{example}'"
            )
    return given


def _instruments(options: dict[str, Any]) -> Iterator[Instrument]:
    """Yield the pass instruments that the command's options request, in the order in which they are called."""
    from remat.passes import instruments

    if options["opt_bisect_limit"] is not None:
        yield instruments.OptBisect(options["opt_bisect_limit"], write=_note)
    if options["repro_dir"] is not None:
        yield instruments.Reproducer(options["repro_dir"])
    if options["verify_each"] is not None:
        yield instruments.VerifyEach(numbers=options["verify_each"] == "numbers")
    if options["dump_dir"] is not None:
        yield instruments.Printed(to=options["dump_dir"])
    before, after = options["print_before_all"], options["print_after_all"]
    if before or after:
        yield instruments.Printed(to=_note, before=before, after=after)
    if options["only"] and not after:
        yield instruments.Printed(to=_note, only=options["only"])
    if options["print_changed"]:
        yield instruments.Printed(to=_note, changed=True)
    # Timing comes last, so that the time of a pass does not include the work of other instruments.
    if options["time_passes"]:
        yield instruments.Timing()


def _note(text: str) -> None:
    click.echo(text, err=True)
    sys.stderr.flush()

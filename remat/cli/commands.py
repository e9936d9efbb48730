"""The commands. Exit codes: 0 done, 1 the job failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.progress import Progress
from remat.errors import CaptureError, PeakWarning, RematError
from remat.version import __version__

if TYPE_CHECKING:
    from remat.cli.example import Example
    from remat.graph.joint import JointGraph
    from remat.planning.plan import PlanSet
    from remat.planning.request import PlanRequest


#: Exit code of a command that Ctrl-C ended: 128 and the number of the signal.
INTERRUPTED = 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, without the line of ours that warns."""
    click.echo(f"warning: {params.one_line(message)}", err=True)


class _Group(click.Group):
    """Turns what remat raises on purpose into one paragraph and exit code 1, and Ctrl-C into 130."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _interruptible():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _interruptible():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        if str(Path.cwd()) not in sys.path:  # for package.module:function and module:Class
            sys.path.insert(0, str(Path.cwd()))
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # of libraries; refused plugins are told below
                warnings.filterwarnings("default", message="the cache of measured costs")
                warnings.simplefilter("default", PeakWarning)
                warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except RematError as error:
                click.echo(f"error: {params.one_line(error)}", err=True)
                ctx.exit(1)
            finally:
                _tell_refused_plugins()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a command in one line; click by itself would exit with 1, as if the job had failed."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="remat")
def main() -> None:
    """Decide what a training step keeps in memory and what it computes again.

    MODEL is file.py:function or package.module:function, a callable that returns (model, args) or
    (model, args, kwargs); or hf:TYPE, a transformers model built from its config without its
    weights, with key=value overrides of the config behind it.
    """


def options(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments and options that several commands have, in the order of the help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


cost_option = click.option(
    "--cost",
    metavar="COST",
    default="auto",
    show_default=True,
    help="cost model: see `remat costs`; roofline-fused:a100 names a device",
)
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON, for machines")
budget_option = click.option(
    "--budget",
    metavar="BUDGET",
    default="0.5",
    show_default=True,
    help="share of the activation bytes from 0 to 1, or bytes: 8GiB, 512MB, 1000000; peak:40GiB and "
    "peak:0.5 bound the peak",
)
solver_option = click.option(
    "--solver",
    metavar="SOLVER",
    default="auto",
    show_default=True,
    help="who decides: see `remat solvers`; module:Class names any other",
)
reread_option = click.option(
    "--no-reread-inputs",
    "reread_inputs",
    is_flag=True,
    flag_value=False,
    default=True,
    help="let inputs be refilled between forward and backward: none is read again but parameters, "
    "buffers, and what eager autograd would have saved too",
)
batch_option = click.option(
    "--batch", type=click.IntRange(min=1), help="batch size of an hf model [default: 4]"
)
seq_option = click.option(
    "--seq", type=click.IntRange(min=1), help="tokens of an hf model [default: up to 512]"
)
time_limit_option = click.option(
    "--time-limit",
    type=params.SECONDS,
    help="seconds for a solver on one problem; without it work is counted, not time",
)


#: Options of every command that may trace a model.
tracing_options = options(
    click.option(
        "--lower",
        type=click.Choice(["inductor", "eager"]),
        default="inductor",
        show_default=True,
        help="what the graph is lowered to: Inductor's decompositions, or none",
    ),
    click.option(
        "--device",
        type=params.DeviceType(),
        help="trace as if everything lay on this device; by default where the tensors are",
    ),
    batch_option,
    seq_option,
)
model_arguments = options(
    click.argument("model", metavar="MODEL"),
    click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1),
)
#: Arguments and options of every command that captures a model.
capture_options = options(model_arguments, cost_option, tracing_options, json_option)
#: Those of every command that plans one.
_model_options = options(capture_options, time_limit_option, reread_option)


@main.command()
@_model_options
@budget_option
@solver_option
@click.option(
    "--save",
    type=params.OutputFile(),
    help="write the plan to this file, to be reused with options={'plan': FILE}",
)
@click.option(
    "--hooks",
    metavar="PAIR",
    help="pair of saved-tensor hooks that what is saved passes through: bf16, float8, int8, cpu-offload",
)
@click.option(
    "--no-fullgraph",
    "fullgraph",
    is_flag=True,
    flag_value=False,
    default=True,
    help="plan all graphs of a model with graph breaks together, under one budget",
)
@click.option(
    "--run",
    is_flag=True,
    help="with --no-fullgraph: run forward once on real tensors, to take branches that depend on numbers",
)
@click.option("--explain", is_flag=True, help="also print what is saved and what is recomputed")
def plan(
    model: str,
    overrides: tuple[str, ...],
    budget: str,
    solver: str,
    cost: str,
    time_limit: float | None,
    reread_inputs: bool,
    save: Path | None,
    hooks: str | None,
    explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan one training step of MODEL under a memory budget."""
    from remat.cli import tables
    from remat.planning.plan import Plan
    from remat.planning.plan_set import plan_graphs
    from remat.planning.planner import plan_graph

    request = plan_request(
        budget=budget,
        solver=solver,
        cost=cost,
        time_limit=time_limit,
        hooks=hooks,
        reread_inputs=reread_inputs,
    )
    if options["run"] and options["fullgraph"]:
        raise click.UsageError("'--run' goes together with '--no-fullgraph' only")
    with Progress() as progress:
        example, joints, captured = capture_graphs(progress, model, overrides, **options)
        progress.step("planning")
        made: Plan | PlanSet = (
            plan_graph(joints[0], request) if len(joints) == 1 else plan_graphs(joints, request)
        )
    if save is not None:
        params.write(save, made.to_json(), "plan")
    if as_json:
        click.echo(made.to_json(), nl=False)
        return
    for joint, one in zip(joints, [made] if isinstance(made, Plan) else made, strict=True):
        tables.show(tables.plan_table(one, _title(example, joint, captured)))
    if not isinstance(made, Plan):
        click.echo(made.explain().partition("\n")[0])
    if explain:
        click.echo("\n" + made.explain())
    if save is not None:
        click.echo(f"plan written to {save}")


@main.command()
@_model_options
@click.option(
    "--solvers",
    type=params.ListOf(params.SOLVER_NAME),
    help="solvers to compare, with commas; by default all that can run here",
)
@click.option(
    "--budgets",
    type=params.ListOf(click.STRING),
    metavar="BUDGET,…",
    default="0.2,0.5,0.8",
    show_default=True,
    help="budgets to plan at, with commas: 0.5, 8GiB, peak:40GiB, peak:0.5",
)
def compare(
    model: str,
    overrides: tuple[str, ...],
    solvers: tuple[str, ...] | None,
    budgets: tuple[str, ...],
    cost: str,
    time_limit: float | None,
    reread_inputs: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan MODEL with several solvers at several budgets, side by side.

    The best of each budget carry a star. The gap is the share of the cost above a proven bound.
    """
    from remat import api
    from remat.cli import tables
    from remat.planning.comparison import ComparisonRow
    from remat.planning.comparison import compare as run_all

    common: dict[str, Any] = {
        "cost": cost,
        "time_limit": time_limit,
        "reread_inputs": reread_inputs,
    }
    asked = [plan_request(budget=budget, **common).budget for budget in budgets]
    names = api.solver_names() if solvers is None else solvers
    with Progress() as progress:
        example, joint, captured = capture_model(progress, model, overrides, **options)
        total, done = len(names) * len(budgets), 0

        def count(row: ComparisonRow) -> None:
            nonlocal done
            done += 1
            progress.step(f"comparing: {done} of {total} plans, last {row.solver} at {row.budget}")

        progress.step(f"comparing: 0 of {total} plans")
        comparison = run_all(joint, names, asked, on_row=count, **common)
    if as_json:
        click.echo(comparison.to_json(), nl=False)
    else:
        title = f"{_title(example, joint, captured)}; cost model {comparison.cost}"
        tables.show(tables.comparison_table(comparison, title))
        for note in (*tables.comparison_notes(comparison), *tables.LEGEND):
            click.echo(note)
    if all(row.reason is not None for row in comparison.rows):
        raise RematError("no solver found a plan at any of these budgets; the reasons stand above")


@main.command()
@json_option
def solvers(as_json: bool) -> None:
    """List the solvers, and why those that cannot run here cannot."""
    from remat.cli import listings
    from remat.plugins.registry import registry

    rows = listings.solver_rows()
    _list(as_json, {"solvers": rows}, refused=[str(problem) for problem in registry().problems])


@main.command()
@click.option("--pipeline", is_flag=True, help="print the pipeline that plans come about by")
@json_option
def passes(pipeline: bool, as_json: bool) -> None:
    """List the passes and analyses, with the options that a pipeline can give them."""
    from remat.cli import listings

    if pipeline:
        from remat.api import default_pipeline

        text = str(default_pipeline())
        click.echo(json.dumps({"pipeline": text}) if as_json else text)
        return
    _list(as_json, {"passes": listings.pass_rows(), "analyses": listings.analysis_rows()})


@main.command()
@json_option
def costs(as_json: bool) -> None:
    """List the cost models, and the devices that they know."""
    from remat.cli import listings

    _list(as_json, {"costs": listings.cost_rows()})


def _list(as_json: bool, rows: dict[str, Any], **more: Any) -> None:
    """Prints lists, each as a table of its own, or all as JSON with what else there is to know."""
    from remat.cli import tables

    if as_json:
        echo_json(rows | more)
        return
    for k, (what, of) in enumerate(rows.items()):
        if k:
            click.echo()
        tables.show(tables.listing(what, of))


def plan_request(**options: Any) -> PlanRequest:
    """The request of the running command, from options as they were typed; a bad one is wrong usage.

    Args:
        options: those of `remat.planning.request.PlanRequest.of`.

    Raises:
        click.BadParameter: an option cannot be meant; the option of the command is named.
    """
    from remat.planning.request import PlanRequest

    with wrong_usage():
        return PlanRequest.of(**options)


@contextlib.contextmanager
def wrong_usage(option: str = "") -> Iterator[None]:
    """Makes an error about an option wrong usage of the running command.

    Args:
        option: which one; the one that the error names where empty.

    Raises:
        click.BadParameter: it names the option of the command.
    """
    try:
        yield
    except RematError as error:
        context = click.get_current_context()
        called = {param.name: param for param in context.command.params}
        about = option or error.option
        param = called.get(about) or called.get(f"{about}s")
        raise click.BadParameter(params.one_line(error), context, param) from None


def capture_model(
    progress: Progress, model: str, overrides: tuple[str, ...], **options: Any
) -> tuple[Example, JointGraph, float]:
    """Builds MODEL and captures it as one graph; see `capture_graphs`."""
    example, joints, seconds = capture_graphs(progress, model, overrides, **options)
    return example, joints[0], seconds


#: What an argument of `remat.capture` is called on the command line.
_IN_COMMAND = {"fullgraph=False": "--no-fullgraph", "run=True": "--run"}


def capture_graphs(
    progress: Progress,
    model: str,
    overrides: tuple[str, ...],
    *,
    lower: str,
    device: str | None,
    fullgraph: bool = True,
    run: bool = False,
    **options: Any,
) -> tuple[Example, list[JointGraph], float]:
    """Builds and captures MODEL; what its code prints goes to standard error.

    Raises:
        CaptureError: as from `remat.capture`, with the options of the command instead of arguments.
    """
    from remat.cli.models import load
    from remat.graph.capture import capture

    if "TORCH_LOGS" not in os.environ:
        logging.disable(logging.ERROR)  # what goes wrong is in our error, without a log of it
    with contextlib.redirect_stdout(sys.stderr):
        progress.step(f"building {model}")
        example = load(model, overrides, **options)
        progress.step(f"capturing {model}")
        start = time.perf_counter()
        given: dict[str, Any] = {"lower": lower, "device": device}
        if not fullgraph:
            given |= {"fullgraph": False, "run": run}
        try:
            found = capture(example.model, example.args, example.kwargs, **given)
        except CaptureError as error:
            needed = [_IN_COMMAND[r] for r in error.remedies if r in _IN_COMMAND]
            if not needed:
                raise
            raise CaptureError(
                f"{error.reason}. Change that line, or plan all graphs of the model together: "
                f"remat plan {model} {' '.join(needed)}"
            ) from error
    joints = found if isinstance(found, list) else [found]
    return example, joints, time.perf_counter() - start


def _title(example: Example, joint: JointGraph, captured_s: float) -> str:
    nodes = len(joint.graph.nodes)
    return f"{example.title}: {nodes:,} nodes, captured in {captured_s:.1f} s"


def echo_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))


def _tell_refused_plugins() -> None:
    """Plugins that were refused, one paragraph each; quiet if none was asked for."""
    registries = sys.modules.get("remat.plugins.registry")
    if registries is None:
        return
    for problem in registries.registry().problems:
        click.echo(f"warning: {params.one_line(problem)}", err=True)

"""The commands. Exit codes: 0 done, 1 the job failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.errors import (
    asks_for_json,
    echo_error,
    interruptible,
    show_warning,
    tell_refused_plugins,
)
from remat.cli.progress import QUIET, Progress
from remat.errors import CaptureError, PeakWarning, RematError
from remat.version import __version__

if TYPE_CHECKING:
    from remat.cli.example import Example
    from remat.graph.joint import JointGraph
    from remat.planning.request import PlanRequest


#: Key of the context under which it is noted that the command is to print JSON.
_AS_JSON = "remat.json"


#: Groups of the help, with the commands of each and an example of each command.
HELP: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "plan": "remat plan hf:gpt2 --budget peak:0.5 --save plan.json",
        "frontier": "remat frontier hf:gpt2 --solvers auto,greedy --plot frontier.svg",
        "fit": "remat fit train.py:build --memory 80GiB",
        "compare": "remat compare hf:gpt2 --solvers auto,cpsat,greedy --budgets 0.25,0.5",
        "sweep": "remat sweep hf:gpt2 hf:bert --budgets 0.25,0.5 --jobs 2 -o sweep.jsonl",
        "sac": "remat sac train.py:build --memory 12GiB -o checkpoints.json",
    },
    "See": {
        "explain": "remat explain hf:gpt2 --budget peak:0.5 --html page.html",
        "diff": "remat diff before.json after.json",
    },
    "Solve": {
        "capture": "remat capture hf:gpt2 -o gpt2.json",
        "solve": "remat solve gpt2.json --solver cpsat --budget 0.5",
        "solvers": "remat solvers --json",
        "costs": "remat costs",
    },
    "Develop": {
        "passes": "remat passes --pipeline",
        "opt": "remat opt hf:gpt2 --passes dce,cse --statistics",
        "reduce": "remat reduce joint.txt --test 'python check.py {}' -o small.txt",
        "repro": "remat repro /tmp/remat-repro/0",
    },
}


class _Group(click.Group):
    """Turns what remat raises on purpose into one paragraph and exit code 1, and Ctrl-C into 130.

    Under ``--json`` the paragraph is ``{"error": {"kind": …, "message": …}}`` on standard output, wrong
    usage included.
    """

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; its help ends with its example."""
        super().add_command(cmd, name)
        for examples in HELP.values():
            if (name or cmd.name) in examples:
                cmd.epilog = f"Example: {examples[name or cmd.name or '']}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group; a plugin's own come last."""
        grouped = [name for group in HELP.values() for name in group]
        others = [name for name in self.list_commands(ctx) if name not in grouped]
        for title, names in (*HELP.items(), ("More", others)):
            rows = [
                (name, self.commands[name].get_short_help_str(limit=formatter.width - 16))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **extra: Any
    ) -> click.Context:
        with interruptible():
            return super().make_context(info_name, args, *more, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = asks_for_json(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with interruptible():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # of libraries; refused plugins are told below
                warnings.filterwarnings("default", message="the cache of measured costs")
                warnings.simplefilter("default", PeakWarning)
                warnings.showwarning = show_warning
            try:
                return super().invoke(ctx)
            except (RematError, click.ClickException) as error:
                if ctx.meta[_AS_JSON]:
                    echo_error(error)
                elif isinstance(error, click.ClickException):
                    raise
                else:
                    click.echo(f"error: {params.one_line(error)}", err=True)
                ctx.exit(error.exit_code if isinstance(error, click.ClickException) else 1)
            finally:
                tell_refused_plugins()


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


def _note_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_note_quiet,
    help="do not tell on standard error what is being done",
)
json_option = options(
    click.option("--json", "as_json", is_flag=True, help="print JSON, for machines; errors too"),
    quiet_option,
)
budget_option = click.option(
    "--budget",
    metavar="BUDGET",
    default="1",
    show_default=True,
    help="bytes of the step's peak (40GiB, 512MB), peak:0.5 (0: the least peak found, 1: that of budget 1), "
    "saved:8GiB (bytes of saved activations), or a ratio of them from 0 to 1",
)
solver_option = click.option(
    "--solver",
    type=params.SOLVER,
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
    "buffers, and what eager autograd would have saved too; nor is an output",
)
batch_option = click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="batch size of an hf model [default: 4], or what a function with an argument batch is called with",
)
seq_option = click.option(
    "--seq", type=click.IntRange(min=1), help="tokens of an hf model [default: up to 512]"
)
offload_option = click.option(
    "--offload",
    metavar="LINK",
    help="under a budget on the peak: saved values may go to the host over this link where that pays: 25GB/s, "
    "or pcie4, pcie5, nvlink-c2c",
)
time_limit_option = click.option(
    "--time-limit",
    type=params.SECONDS,
    help="seconds for a solver on one problem; without it work is counted, not time",
)


lower_option = click.option(
    "--lower",
    type=click.Choice(["inductor", "eager"]),
    default="inductor",
    show_default=True,
    help="what the graph is lowered to: Inductor's decompositions, or none",
)
device_option = click.option(
    "--device",
    type=params.DeviceType(),
    help="trace as if everything lay on this device; by default where the tensors are",
)
#: Options of every command that may trace a model.
tracing_options = options(lower_option, device_option, batch_option, seq_option)
model_arguments = options(
    click.argument("model", metavar="MODEL", is_eager=True, callback=params.check_file),
    click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1),
)
#: Arguments and options of every command that captures a model.
capture_options = options(model_arguments, cost_option, tracing_options, json_option)
#: Those of every command that plans one.
model_options = options(capture_options, time_limit_option, reread_option)


#: Options of commands that `takes_request` reads.
REQUEST_OPTIONS = (
    "budget",
    "solver",
    "cost",
    "time_limit",
    "hooks",
    "reread_inputs",
    "offload",
)


def takes_request(command: Callable[..., Any]) -> Callable[..., Any]:
    """Passes the `REQUEST_OPTIONS` of a command as one argument ``request``, read and checked.

    Apply it directly above the function, below its options. A ``budget`` of None counts as left out.
    """

    @functools.wraps(command)
    def read(**options: Any) -> Any:
        given = {name: options.pop(name) for name in REQUEST_OPTIONS if name in options}
        if given.get("budget", "") is None:
            del given["budget"]
        return command(request=plan_request(**given), **options)

    return read


def plan_request(**options: Any) -> PlanRequest:
    """The request of the running command, from options as they were typed.

    Args:
        options: those of `remat.planning.request.PlanRequest.of`, or without a budget, of `without_budget`.

    Raises:
        click.BadParameter: an option is refused; the message names the option of the command.
    """
    from remat.planning.request import PlanRequest

    with wrong_usage():
        return (PlanRequest.of if "budget" in options else PlanRequest.without_budget)(**options)


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


@contextlib.contextmanager
def users_output() -> Iterator[None]:
    """Sends what a model's code prints to standard error, and keeps PyTorch's error logs quiet.

    The errors that PyTorch logs are in the error that remat raises. ``TORCH_LOGS`` keeps the logs.
    """
    before = logging.root.manager.disable
    if "TORCH_LOGS" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


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

    with users_output():
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


def title_of(example: Example, joint: JointGraph, captured_s: float) -> str:
    nodes = len(joint.graph.nodes)
    return f"{example.title}: {nodes:,} nodes, captured in {captured_s:.1f} s"


def echo_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))

"""The command group ``remat``, and the options and helpers that its commands share.

Exit codes: 0 done, 1 the command failed, 2 wrong usage, 130 interrupted by Ctrl-C. `plan` and `repro` have further exit
codes.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from remat.arguments import documented
from remat.cli import params
from remat.cli.output import (
    JSON,
    QUIET,
    asks_for_json,
    echo_json,
    interruptible,
    show_warning,
    tell_refused_plugins,
)
from remat.cli.progress import Progress
from remat.errors import CaptureError, PeakWarning, PlanError, RematError
from remat.options import PlanOptions, StepOptions
from remat.version import __version__

if TYPE_CHECKING:
    from remat.cli.example import Example
    from remat.graph.joint import JointGraph


#: Limit in characters on summaries of commands, above the length of each summary, so that Click wraps and does not
#: cut summaries.
_WHOLE_SENTENCE = 1_000


#: Dict from the title of each section of the help to a dict from the name of each command to an example command line.
HELP: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "plan": "remat plan hf:gpt2 --budget peak:0.5 --save plan.json",
        "frontier": "remat frontier hf:gpt2 --solvers auto,greedy --plot frontier.svg",
        "fit": "remat fit train.py:build --memory 80GiB",
        "compare": "remat compare hf:gpt2 --solvers auto,cpsat,greedy --budgets 0.25,0.5",
        "sweep": "remat sweep hf:gpt2 hf:bert --budgets 0.25,0.5 --jobs 2 -o sweep.jsonl",
        "sac": "remat sac train.py:build --memory 12GiB -o checkpoints.json",
    },
    "Train": {
        "run": "remat run --budget 40GiB train.py --epochs 3",
    },
    "See": {
        "policies": "remat policies hf:gpt2 --budget peak:0.5 --policy '*.attn=save'",
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


class Command(click.Command):
    """Command that reports a `RematError` about one of its options as wrong usage, with exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RematError as error:
            by_name = {param.name: param for param in self.params}
            # Some commands take a list of values for an option: ``--budgets`` for ``budget``.
            param = by_name.get(error.option) or by_name.get(f"{error.option}s")
            # A `PlanError` means that a valid option does not fit the graph.
            if param is None or isinstance(error, PlanError):
                raise
            raise click.BadParameter(params.one_line(error), ctx, param) from None


class _Group(click.Group):
    """Command group that prints errors of remat in one paragraph or as JSON, without a traceback."""

    command_class = Command

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, and append its example from `HELP` to its help."""
        super().add_command(cmd, name)
        own = cmd.name or ""
        (cmd.epilog,) = (f"Example: {group[own]}" for group in HELP.values() if own in group)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in the help under the sections of `HELP`."""
        for title, names in HELP.items():
            with formatter.section(title):
                formatter.write_dl(
                    (name, self.commands[name].get_short_help_str(limit=_WHOLE_SENTENCE))
                    for name in names
                )

    @interruptible()
    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **extra: Any
    ) -> click.Context:
        return super().make_context(info_name, args, *more, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # This is set before parsing, so that errors of parsing are printed as JSON, too.
        ctx.meta[JSON] = asks_for_json(args)
        return super().parse_args(ctx, args)

    @interruptible()
    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                # Warnings of libraries are hidden; `tell_refused_plugins` prints refused plugins.
                warnings.simplefilter("ignore")
                # Two warnings of remat are shown nevertheless: an unusable cache of measured costs, and `PeakWarning`.
                warnings.filterwarnings("default", message="the cache of measured costs")
                warnings.simplefilter("default", PeakWarning)
                warnings.showwarning = show_warning
            error: RematError | click.ClickException | None = None
            try:
                return super().invoke(ctx)
            except click.ClickException as usage:
                error = usage
                if not ctx.meta[JSON]:
                    raise
                ctx.exit(usage.exit_code)
            except RematError as failure:
                error = failure
                if not ctx.meta[JSON]:
                    click.echo(f"error: {params.one_line(failure)}", err=True)
                ctx.exit(1)
            finally:
                if ctx.meta[JSON]:
                    echo_json(ctx, error)
                tell_refused_plugins()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="remat")
def main() -> None:
    """Decide what a training step saves for backward and what it recomputes.

    MODEL is file.py:function or package.module:function, a callable that returns (model, args) or
    (model, args, kwargs). Or MODEL is hf:TYPE, a transformers model that is built from its config
    without its weights. Overrides of the config follow hf:TYPE as key=value.
    """


def options(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    """Combine click's decorators of arguments and options into one; the help lists the options in the given order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        # The decorator that is applied last comes first in click's help.
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def list_option(
    name: str,
    text: str,
    item: params.ParamType = click.STRING,
    default: str | tuple[()] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an option with comma-separated values; ``name`` is a plural without dashes."""
    return click.option(
        f"--{name}",
        type=params.ListOf(item),
        metavar=f"{name[:-1].upper()},…",
        default=default,
        show_default=True,
        help=text,
    )


#: Dict from a field of `PlanOptions`, `Training` or `Step` to the settings of click that differ from the field's own. The
#: setting ``flag`` is the option's name without dashes.
_CLICK: Mapping[str, Mapping[str, Any]] = {
    "solver": {"type": params.SOLVER},
    "time_limit": {"type": params.SECONDS, "metavar": "SECONDS"},
    "hooks": {"metavar": "PAIR"},
    "offload": {"metavar": "LINK"},
    "host_memory": {"metavar": "BYTES"},
    "chunk": {"metavar": "N|auto"},
    "policies": {"flag": "policy", "metavar": "PATTERN=VALUE", "multiple": True},
    "lower": {"type": click.Choice(["inductor", "eager"])},
    "device": {"type": params.DEVICE},
    "batch": {"type": click.IntRange(min=1)},
    "seq": {"type": click.IntRange(min=1)},
    "batches": {"flag": "batch", "metavar": "BATCH,…|max"},
    "link_gbps": {"flag": "link", "type": float, "metavar": "GB/s"},
}


def record_options(record: type, *names: str) -> Callable[..., Any]:
    """Return a decorator that adds one option to a command for each named field of a dataclass."""
    return options(*(_option(record, field) for field in fields(record) if field.name in names))


def _option(record: type, field: Field[Any]) -> Callable[..., Any]:
    """Return a decorator that adds the option for one field of a dataclass, with the overrides in `_CLICK`."""
    name, default = field.name.replace("_", "-"), field.default
    overrides = _CLICK.get(field.name, {})
    settings: dict[str, Any] = {"default": default, "show_default": default is not None}
    if default is MISSING:
        settings = {"required": True}
    if isinstance(default, bool):
        name = f"{name}/--no-{name}"
    elif isinstance(default, int):
        settings["type"] = int
    elif "type" not in overrides:
        settings |= {"type": str, "metavar": name.upper()}
    settings |= overrides
    text = " ".join(documented(record).get(field.name, "").replace("``", "").split())
    sentence = text.partition(": ")[2].partition(". ")[0].rstrip(".")
    return click.option(f"--{settings.pop('flag', name)}", field.name, help=sentence, **settings)


#: Decorator that adds options of planning to a command.
plan_options = functools.partial(record_options, PlanOptions)


def _output_flag(key: str, *names: str, text: str) -> Callable[..., Any]:
    """Return a decorator that adds a flag to a command; the flag's value is stored in ``click.Context.meta``."""

    def store(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.meta[key] = value

    flag = {"is_flag": True, "is_eager": True, "expose_value": False}
    return click.option(*names, callback=store, help=text, **flag)  # type: ignore[arg-type]


#: The options ``--json`` and ``--quiet``, which control what a command prints.
json_option = options(
    _output_flag(JSON, "--json", text="print JSON, for machines; errors too"),
    _output_flag(QUIET, "-q", "--quiet", text="do not print progress on standard error"),
)
#: Names of the options of planning that all commands take if they plan a model.
PLANNING = ("cost", "time_limit", *StepOptions.__annotations__)


def takes_request(*names: str) -> Callable[..., Any]:
    """Return a decorator that adds options of planning to a command, and passes a request with their values.

    If a command has no option ``budget``, `PlanRequest.without_budget` makes the request.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def read(**options: Any) -> Any:
            from remat.planning.request import PlanRequest

            given = planning_options(options)
            make = PlanRequest.of if "budget" in given else PlanRequest.without_budget
            return command(request=make(**given), **options)

        decorated: Callable[..., Any] = plan_options(*names)(read)
        return decorated

    return decorate


def planning_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of planning from a command's options, and return them as a dict."""
    names = [field.name for field in fields(PlanOptions) if field.name in options]
    return {name: options.pop(name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The captured training step of MODEL, which is the model that the command line names.

    Attributes:
        example: the model, and the arguments of the captured call.
        joints: the joint graphs of the step; a single one unless graph breaks were allowed.
    """

    example: Example
    joints: Sequence[JointGraph]

    @property
    def joint(self) -> JointGraph:
        """The first joint graph, which is the only one unless graph breaks were allowed."""
        return self.joints[0]

    def title(self, joint: JointGraph | None = None) -> str:
        """Return a title for the output: the model, and the number of nodes of a graph."""
        return f"{self.example.title}: {len((joint or self.joint).graph.nodes):,} nodes"


#: Dict from an argument of `remat.capture`, as an error recommends it, to the command's option for this argument.
_IN_COMMAND = {"fullgraph=False": "--no-fullgraph", "run=True": "--run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The training step that a command line describes.

    Each option's text in this docstring is also its help on the command line.

    Attributes:
        model: MODEL.
        overrides: ``key=value`` texts for the config of an ``hf`` model.
        lower: decompose the graph's operators as Inductor does, or keep those of eager PyTorch
        device: trace as if all tensors were on this device [default: the device of the tensors]
        batch: batch size of an hf model [default: 4], or the value of the argument batch of your function
        seq: sequence length of an hf model in tokens [default: up to 512]
    """

    model: str
    overrides: tuple[str, ...]
    lower: str = "inductor"
    device: str | None = None
    batch: int | None = None
    seq: int | None = None

    def capture(self, progress: Progress, *, fullgraph: bool = True, run: bool = False) -> Captured:
        """Build the model and capture its training step; ``fullgraph`` and ``run`` are as in `remat.capture`.

        Raises:
            CaptureError: the step cannot be captured as requested. The error's advice names options of
                the command instead of arguments of `remat.capture`.
        """
        from remat.cli.models import load, users_output
        from remat.graph.capture.step import capture

        with users_output():
            progress.stage(f"building {self.model}")
            example = load(self.model, self.overrides, batch=self.batch, seq=self.seq)
            progress.stage(f"capturing {self.model}")
            # The arguments are in a dict, because the type checker selects an overload of `capture` by a
            # literal `fullgraph`.
            how: dict[str, Any] = {"fullgraph": fullgraph, "run": run, "lower": self.lower}
            try:
                captured = capture(
                    example.model, example.args, example.kwargs, device=self.device, **how
                )
            except CaptureError as error:
                remedies = [_IN_COMMAND[r] for r in error.remedies if r in _IN_COMMAND]
                if not remedies:
                    raise
                raise CaptureError(
                    f"{error.reason}. Change that line, or plan all graphs of the model together: "
                    f"remat plan {self.model} {' '.join(remedies)}"
                ) from error
        joints = captured if isinstance(captured, list) else [captured]
        return Captured(example=example, joints=joints)


#: Options of all commands that may trace a model.
tracing_options = record_options(Step, "lower", "device", "batch", "seq")
model_arguments = options(
    click.argument("model", metavar="MODEL", is_eager=True, callback=params.check_file),
    click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1),
)


def reads_step(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command, so that it gets the values of its `Step` options as the one argument ``step``."""

    @functools.wraps(command)
    def read(**options: Any) -> Any:
        step = Step(**{field.name: options.pop(field.name) for field in fields(Step)})
        return command(step=step, **options)

    return read


def takes_step(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add MODEL, the options of tracing, ``--json`` and ``--quiet`` to a command, and pass MODEL's step as ``step``."""
    decorate = options(model_arguments, tracing_options, json_option)
    decorated: Callable[..., Any] = decorate(reads_step(command))
    return decorated

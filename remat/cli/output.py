"""Output of commands: results, errors and warnings, as text or, under ``--json``, as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from remat.cli import params
from remat.errors import RematError

#: Exit code of a command that Ctrl-C ended: 128 plus the number of the signal SIGINT.
INTERRUPTED = 130
#: Keys in ``click.Context.meta`` under which commands store whether ``--json`` and ``--quiet`` were given.
JSON, QUIET = "remat.json", "remat.quiet"
#: Key in ``click.Context.meta`` under which a command stores its results.
_RESULTS = "remat.results"


def asks_for_json(args: Sequence[str]) -> bool:
    """Whether a command line contains the option ``--json``, found without parsing the line."""
    return "--json" in args[: args.index("--")] if "--" in args else "--json" in args


def as_json(results: Mapping[str, Any] | str) -> bool:
    """If ``--json`` was given, set the results that the command prints; return whether it was given.

    Results are printed when the command ends. If the command fails, the JSON object of the results also contains the
    error.

    Args:
        results: the results, or their JSON text.
    """
    meta = click.get_current_context().meta
    meta[_RESULTS] = results
    return bool(meta.get(JSON))


def echo_json(ctx: click.Context, error: RematError | click.ClickException | None) -> None:
    """Print the results of a command, and its error if there is one, as one JSON object."""
    results = ctx.meta.get(_RESULTS, {})
    if error is not None:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        described = {"kind": type(error).__name__, "message": params.one_line(message)}
        data = json.loads(results) if isinstance(results, str) else results
        results = {**data, "error": described}
    if results:
        text = results if isinstance(results, str) else json.dumps(results, indent=2)
        click.echo(text.rstrip("\n"))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """If Ctrl-C interrupts the ``with`` block, print one line, and end the command with exit code 130."""
    # Click alone would exit with 1, as if the command had failed.
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without the source line that `warnings` adds by default."""
    click.echo(f"warning: {params.one_line(message)}", err=True)


def tell_refused_plugins() -> None:
    """Print on standard error why remat refused plugins; print nothing if the command did not look for plugins."""
    registries = sys.modules.get("remat.plugins.registry")
    if registries is None:
        return
    for problem in registries.registry().problems:
        click.echo(f"warning: {params.one_line(problem)}", err=True)

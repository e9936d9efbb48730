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


def asks_for_json(args: Sequence[str]) -> bool:
    """Whether a command line contains the option ``--json``, found without parsing the line."""
    return "--json" in args[: args.index("--")] if "--" in args else "--json" in args


def wants_json() -> bool:
    """Whether the current command was given ``--json``."""
    return bool(click.get_current_context().meta.get(JSON))


def echo_json(data: Mapping[str, Any] | str, failure: RematError | None = None) -> bool:
    """Print the results of a command if ``--json`` was given; return whether it was given.

    Args:
        data: the results, or their JSON text.
        failure: why the command failed although it has results; printed in the same JSON object as the results.

    Raises:
        click.exceptions.Exit: with code 1, after printing a failure.
    """
    if not wants_json():
        return False
    if failure is not None:
        echo_error(failure, json.loads(data) if isinstance(data, str) else data)
        click.get_current_context().exit(1)
    click.echo(data.rstrip("\n") if isinstance(data, str) else json.dumps(data, indent=2))
    return True


def echo_error(
    error: RematError | click.ClickException, data: Mapping[str, Any] | None = None
) -> None:
    """Print an error as a JSON object, with the results of the command in the same object."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    described = {"kind": type(error).__name__, "message": params.one_line(message)}
    click.echo(json.dumps({**(data or {}), "error": described}, indent=2))


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

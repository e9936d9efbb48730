"""The command ``remat run``: train an unedited script under a budget."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from remat.cli.commands import PLANNING, main, plan_options
from remat.errors import about

#: Environment variable that keeps PyTorch from loading entry points.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
#: Folder of an installed distribution without code. Its entry point in the group ``torch.backends`` makes ``import
#: torch`` call `remat.integrations.unedited.install` if the folder is in ``PYTHONPATH``.
_FOLDER = Path(__file__).parent / "autoload"


@main.command(context_settings={"allow_interspersed_args": False})
@plan_options("budget", "solver", "hooks", *PLANNING)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for python -m")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], module: bool, **options: Any) -> None:
    """Run the Python file SCRIPT with ARGS; remat plans each graph that the script compiles with Inductor.

    The script needs no edits, but must compile its model: by torch.compile(model), model.compile() or a trainer's flag.
    Modes and options of Inductor keep their effect, and graphs that other backends compile are left alone. At the end,
    the plans are printed on standard error.
    """
    context = click.get_current_context()
    given = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    _check(given)
    settings = {"options": given, "pid": os.getpid()}
    path = [str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"REMAT_RUN": json.dumps(settings), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, *_flags(), *(["-m"] if module else []), script, *arguments]
    # Python starts again in this process, so that the script's process does not differ from one without remat.
    os.execve(sys.executable, command, os.environ | variables)


def _check(options: dict[str, Any]) -> None:
    """Check the options, and that PyTorch can load remat in the script's process, before the script runs."""
    if sys.flags.ignore_environment or os.environ.get(_AUTOLOAD, "1") == "0":
        raise click.UsageError(
            f"remat reaches the script by PYTHONPATH and PyTorch's autoloading; run Python without -E and -I, and unset {_AUTOLOAD}"
        )
    if options.keys() <= {"budget", "solver"}:  # both are checked without importing PyTorch
        from remat.units import Budget

        with about("budget"):
            Budget.parse(options.get("budget", 1))
    else:
        from remat.planning.request import PlanRequest

        PlanRequest.of(**options)


def _flags() -> list[str]:
    """Return the flags given to this Python process before ``-m remat`` or remat's path, such as torchrun's ``-u``."""
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    flags = own[:-1]
    return flags[:-1] if flags[-1:] == ["-m"] else flags

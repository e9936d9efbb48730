"""Load the model that the command line names: a function of the user's, or a `transformers` model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from remat.cli import params
from remat.cli.example import Example
from remat.errors import CaptureError, RematError, did_you_mean

FORMS = (
    "expected file.py:function, package.module:function, or hf:TYPE with key=value config overrides"
)


def load(
    spec: str,
    overrides: Sequence[str] = (),
    *,
    batch: int | None = None,
    seq: int | None = None,
    device: str = "meta",
) -> Example:
    """Parse MODEL, build the model, and return the model with the arguments of a call.

    Args:
        spec: ``file.py:function``, ``package.module:function`` or ``hf:TYPE``.
        overrides: ``key=value`` texts for the config of an ``hf`` model.
        batch: batch size of an ``hf`` model, or the first argument for the user's function. None:
            the default of either.
        seq: sequence length of an ``hf`` model; None: its default.
        device: device of weights and inputs of an ``hf`` model.

    Raises:
        click.UsageError: MODEL cannot be parsed or does not exist, or an option does not apply to
            it.
        CaptureError: the user's code raised, or did not return a model and its arguments.
    """
    if is_hf(spec):
        from remat.cli.hf import build

        return build(spec.removeprefix("hf:"), overrides, batch=batch, seq=seq, device=device)
    check_not_hf(spec, overrides, seq)
    function = function_of(spec)
    if batch is None:
        return called(function, spec)
    if not takes_batch(function):
        raise click.UsageError(
            f"'--batch' is {batch}, but '{spec}' takes no batch; give the function an argument 'batch'"
        )
    return called(function, spec, batch)


def check_not_hf(spec: str, overrides: Sequence[str], seq: int | None) -> None:
    """Raise a UsageError if ``overrides`` or ``seq`` is given for a user's function; only ``hf:TYPE`` takes them."""
    given = f"'{overrides[0]}'" if overrides else "--seq" if seq is not None else ""
    if given:
        raise click.UsageError(
            f"{given} is for hf:TYPE only: '{spec}' decides by itself what it returns"
        )


def takes_batch(function: Any) -> bool:
    """Whether a user's function takes the batch size as its first argument, which is required or named ``batch``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (
        positional[0].default is positional[0].empty or positional[0].name == "batch"
    )


def is_hf(spec: str) -> bool:
    """Whether MODEL is ``hf:TYPE`` instead of a function's name; raise a UsageError if MODEL is neither."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise click.UsageError(f"MODEL is '{spec}'; {FORMS}")
    return where == "hf"


def check(spec: str) -> None:
    """Raise a UsageError if MODEL cannot be parsed or does not exist; do not build the model."""
    if is_hf(spec):
        from remat.cli.hf import check_kind

        check_kind(spec.removeprefix("hf:"))
        return
    with contextlib.suppress(CaptureError):
        # An error of the user's code is suppressed here. The user's code raises the error again when the
        # model is built.
        function_of(spec)


def called(function: Any, spec: str, *args: Any) -> Example:
    """Call the user's function, with the batch size or without arguments, and return the result as an `Example`.

    Raises:
        CaptureError: the function raised, or did not return a model and its arguments.
    """
    from remat.graph.capture.calling import read_call

    with users_code(spec):
        returned = function(*args)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise CaptureError(
            f"MODEL '{spec}' returned a {type(returned).__name__}{size}; expected (model, args) or "
            "(model, args, kwargs): a module or function, a tuple of positional arguments, a dict of "
            "keyword arguments"
        )
    model, args, kwargs = returned if len(returned) == 3 else (*returned, {})
    args, kwargs = read_call(args, kwargs)
    return Example(model=model, args=args, kwargs=kwargs, title=spec)


def function_of(spec: str) -> Any:
    """Return the user's function that MODEL names; this imports the function's module, which runs the user's code.

    Raises:
        click.UsageError: the module or the function does not exist, or the name is not callable.
    """
    where, _, name = spec.rpartition(":")
    module = _import_file(Path(where), spec) if where.endswith(".py") else _import(where, spec)
    function: Any = module
    for part in name.split("."):
        try:
            function = getattr(function, part)
        except AttributeError:
            public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise click.UsageError(
                f"MODEL is '{spec}', but {where} has no '{name}'{did_you_mean(name, public)}"
            ) from None
    if not callable(function):
        raise click.UsageError(
            f"MODEL is '{spec}', but '{name}' is of type {type(function).__name__}; expected a function that "
            "returns (model, args, kwargs)"
        )
    return function


def _import_file(path: Path, spec: str) -> ModuleType:
    # As with `python file.py`, modules in the same folder can be imported. The folder comes last in the search path,
    # so that these modules hide no installed ones.
    if str(path.resolve().parent) not in sys.path:
        sys.path.append(str(path.resolve().parent))
    # A file `json.py` must not replace the module `json` in `sys.modules`.
    other = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    name = path.stem if other is None or other.origin == str(path.resolve()) else f"{path.stem}_py"
    source = importlib.util.spec_from_file_location(name, path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module
    with users_code(spec):
        source.loader.exec_module(module)
    return module


def _import(name: str, spec: str) -> ModuleType:
    params.search_here()
    try:
        with users_code(spec):
            return importlib.import_module(name)
    except CaptureError as error:
        cause = error.__cause__
        # The condition is True if the named module or a package around it is missing, and False if a module that
        # it imports is.
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            raise click.UsageError(
                f"MODEL is '{spec}', but there is no module '{cause.name}'; {FORMS}"
            ) from None
        raise
    except ValueError:
        raise click.UsageError(f"MODEL is '{spec}'; {FORMS}") from None


@contextlib.contextmanager
def users_output() -> Iterator[None]:
    """Within the ``with`` block, redirect standard output to standard error, and hide PyTorch's error logs."""
    # The model's code may print, but standard output is for results. PyTorch's logs of errors would repeat the message
    # of remat's own error; a user who sets TORCH_LOGS wants to see them.
    before = logging.root.manager.disable
    if "TORCH_LOGS" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def users_code(spec: str) -> Iterator[None]:
    """Apply `users_output`; convert exceptions except `RematError` to a `CaptureError` that names the user's line."""
    try:
        with users_output():
            yield
    except RematError:
        raise
    except (Exception, SystemExit) as error:
        from remat.graph.capture.errors import raised_at

        message, place = str(error) or "no message", raised_at(error)
        if isinstance(error, SyntaxError):
            message, place = error.msg, f" at {error.filename}:{error.lineno}"
        raise CaptureError(
            f"MODEL '{spec}' raised {type(error).__name__}: {message} ({place.strip()})"
        ) from error

"""Errors of a capture, as one message with the user's line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import CaptureError, RematError, append_message
from remat.graph.joint import JointGraph
from remat.graph.source import frames_of, user_frame


class CapturedError(Exception):
    """Ends a compilation once its joint graph is known."""


class NothingToDifferentiateError(Exception):
    """AOTAutograd asked for an inference graph."""


#: What is added to an error that PyTorch raises by itself, with the backend that raises it.
WITHOUT_REMAT = (
    "PyTorch fails at this program without remat as well: torch.compile(…, backend='{backend}')"
)


def name_plain_failure(
    error: Exception, module: fx.GraphModule, inputs: Sequence[Any], lower: str
) -> None:
    """Says in an error of the compilation of a graph that plain PyTorch fails at it as well, where that is so.

    Args:
        error: what our backend raised. Neither what is an error of ours nor what Dynamo goes on from is looked at.
        module: the graph, as Dynamo hands it to a backend.
        inputs: its inputs.
        lower: the lowering that it is compiled for.
    """
    goes_on = isinstance(error, torch_compat.TorchDynamoException)
    if isinstance(error, RematError) or (goes_on and not hasattr(error, "inner_exception")):
        return
    for backend in ("aot_eager", *(["inductor"] if lower == "inductor" else [])):
        compiler = torch_compat.lookup_backend(backend)
        if raises_alike(error, partial(compiler, module, list(inputs))):
            append_message(error, WITHOUT_REMAT.format(backend=backend))
            return


def raises_alike(error: Exception, run: Callable[[], object]) -> bool:
    """Whether something raises an error of the class of another one."""
    try:
        run()
    except Exception as other:
        return type(_inner(other)) is type(_inner(error))
    return False


def _inner(error: Exception) -> Exception:
    """What a compiler raised, where Dynamo or Inductor says so in an error of its own."""
    return getattr(error, "inner_exception", None) or error


def explain(
    error: Exception,
    name: str,
    sink: list[JointGraph],
    fullgraph: bool,
    not_callable: str,
    is_plain: Callable[[Exception], bool] = lambda _: False,
) -> None:
    """Turns what came out of a compilation into one message, or into nothing if it was the end.

    Args:
        error: what came out.
        name: the program.
        sink: the graphs that were found.
        fullgraph: whether one graph is wanted.
        not_callable: why the program cannot be called like that; empty where it can.
        is_plain: says whether plain PyTorch fails at the program as well.
    """
    for cause in _causes(error):
        if isinstance(cause, (CapturedError, NothingToDifferentiateError)):
            return
        if isinstance(cause, CaptureError):
            raise cause
    if fullgraph and sink:
        return
    if not_callable and not sink:
        raise CaptureError(f"'{name}' cannot be called like that: {not_callable}") from error
    text = str(error).strip()
    where = _user_line(text)
    if _asks_for_numbers(error):
        raise CaptureError(
            f"'{name}' decides by the numbers in a tensor{where or _raised_at(error)}, and fake tensors have none: "
            f"{text.splitlines()[0][:200].rstrip('.')}",
            "Pass fullgraph=False and run=True with real tensors, which takes the branches from a run, or "
            "decide without numbers (torch.where, torch.cond)",
            ("fullgraph=False", "run=True"),
        ) from error
    raised = re.search(r"Developer debug context: raised exception (.+)", text)
    if raised is not None:
        raise CaptureError(
            f"'{name}' raised {raised.group(1).strip()[:400]}{where} while it was traced"
        ) from error
    first = re.split(r"\n\s*\n|\nfrom user code", text)[0].strip()
    first = " ".join(line.strip() for line in first.splitlines())
    if type(error).__name__ in ("Unsupported", "UserError", "FailOnRecompileLimitHit"):
        raise CaptureError(
            f"'{name}' cannot be captured as one graph{where}: {first[:600].rstrip('.')}",
            "Remove the graph break, or pass fullgraph=False for a list of graphs",
            ("fullgraph=False",),
        ) from error
    raised_by = type(_inner(error)).__name__
    first = first.split(f"{raised_by}: ", 1)[-1] if _inner(error) is not error else first
    raise CaptureError(
        f"'{name}' failed while it was traced{where}: {raised_by}: {first[:600].rstrip('.!')}",
        WITHOUT_REMAT.format(backend="aot_eager") if is_plain(error) else "",
    ) from error


def takes_lock(error: Exception) -> bool:
    """Whether a trace as one graph ended because the code takes a lock of `threading`."""
    if type(error).__name__ != "Unsupported":
        return False
    return re.search(r"enter a `R?[lL]ock` context manager", str(error)) is not None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, the one that it was raised for, and so on."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _asks_for_numbers(error: BaseException) -> bool:
    """Whether a trace ended because the value of a tensor was asked for."""
    kinds = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
    return any(type(cause).__name__ in kinds for cause in _causes(error))


def _raised_at(error: BaseException) -> str:
    """The innermost line outside of PyTorch and of this folder that an error came through, as `` at file:line``."""
    ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _at(user_frame(f for f in frames if not f.filename.startswith(ours)))


def _user_line(text: str) -> str:
    """The innermost line that Dynamo names, as `` at file:line``: of the user's, where PyTorch's follow."""
    tail = text.split("from user code:")[-1] if "from user code:" in text else ""
    return _at(user_frame(frames_of(tail)))


def _at(frame: traceback.FrameSummary | None) -> str:
    return "" if frame is None else f" at {frame.filename}:{frame.lineno}"

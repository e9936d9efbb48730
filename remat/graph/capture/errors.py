"""Turn an error of a capture into one message that names the user's source line."""

from __future__ import annotations

import operator
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
from remat.graph.capture.source import frames_of, user_frame
from remat.graph.joint import JointGraph


class CapturedError(Exception):
    """Error that ends a compilation once the joint graph is recorded, or because the graph has no backward."""


#: Sentence added to an error that plain PyTorch raises too; ``backend`` is the backend that raises it.
WITHOUT_REMAT = (
    "PyTorch fails at this program without remat as well: torch.compile(…, backend='{backend}')"
)


#: Cause of a forward that needs backward, for messages. Inductor's joint-graph passes apply the pattern.
RANDPERM_PATTERN = (
    "Inductor's pattern randperm_index_add (torch/_inductor/fx_passes/misc_patterns.py) reads the length of a slice of "
    "torch.randperm from the gradient of what the slice indexes. Forward would need backward. With "
    "options={'lower': 'eager'} the step runs, without Inductor's passes"
)


def name_plain_failure(
    error: Exception, module: fx.GraphModule, inputs: Sequence[Any], lower: str
) -> None:
    """Append a sentence to an error's message if PyTorch without remat fails at the same graph.

    Args:
        error: the error that compiling with remat's backend raised.
        module: the graph, as Dynamo hands it to a backend.
        inputs: inputs of the graph.
        lower: lowering that the graph is compiled for, ``"inductor"`` or ``"eager"``.
    """
    # Errors of remat name their cause. From an error of its own, Dynamo recovers.
    goes_on = isinstance(error, torch_compat.TorchDynamoException)
    if isinstance(error, RematError) or (goes_on and not hasattr(error, "inner_exception")):
        return
    for backend in ("aot_eager", *(["inductor"] if lower == "inductor" else [])):
        compiler = torch_compat.lookup_backend(backend)
        if raises_alike(error, partial(compiler, module, list(inputs))):
            append_message(error, WITHOUT_REMAT.format(backend=backend))
            frames = traceback.extract_tb(_inner(error).__traceback__)
            # The pattern leaves a cycle if the gradient depends on the slice.
            if frames[-1].name == "stable_topological_sort" and _slices_randperm(module):
                append_message(error, RANDPERM_PATTERN)
            return


def _slices_randperm(module: fx.GraphModule) -> bool:
    """Return whether a graph from Dynamo takes a slice of a random permutation."""
    permutations = module.graph.find_nodes(op="call_function", target=torch.randperm)
    return any(user.target is operator.getitem for node in permutations for user in node.users)


def raises_alike(error: Exception, run: Callable[[], object]) -> bool:
    """Return whether running a function raises an error of the same class as ``error``."""
    try:
        run()
    except Exception as other:
        # Dynamo and Inductor wrap errors in classes of their own.
        return type(_inner(other)) is type(_inner(error))
    return False


def _inner(error: Exception) -> Exception:
    """Return the error that a compiler raised, unwrapped from Dynamo's or Inductor's error."""
    return getattr(error, "inner_exception", None) or error


def explain(
    error: Exception,
    name: str,
    sink: list[JointGraph],
    fullgraph: bool,
    not_callable: str,
    plainly: Callable[[], object] | None,
) -> None:
    """Raise a single `CaptureError` that explains a failed compilation.

    Raise nothing if remat itself stopped the compilation after recording the graph, or if the program
    has nothing to differentiate.

    Args:
        error: the error that the compilation raised.
        name: name of the captured module or function, called program here.
        sink: the graphs recorded so far.
        fullgraph: whether the caller asked for a single graph.
        not_callable: why the program does not accept its arguments; empty if it does.
        plainly: runs the program without remat, to see whether PyTorch raises the same error; None
            if the program cannot run again.

    Raises:
        CaptureError: the compilation failed for another reason.
    """
    for cause in _causes(error):
        if isinstance(cause, CapturedError):
            return
        if isinstance(cause, CaptureError):
            raise cause
    # The only requested graph was recorded before the error.
    if fullgraph and sink:
        return
    if not_callable and not sink:
        raise CaptureError(f"'{name}' cannot be called like that: {not_callable}") from error
    text = str(error).strip()
    where = _user_line(text)
    if _asks_for_numbers(error):
        raise CaptureError(
            f"'{name}' decides by the numbers in a tensor{where or raised_at(error)}, and fake tensors have none: "
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
    # Dynamo appends hints and the user's code after a blank line.
    first = re.split(r"\n\s*\n|\nfrom user code", text)[0].strip()
    first = " ".join(line.strip() for line in first.splitlines())
    if type(error).__name__ in ("Unsupported", "UserError", "FailOnRecompileLimitHit"):
        raise CaptureError(
            f"'{name}' cannot be captured as one graph{where}: {first[:600].rstrip('.')}",
            "Remove the graph break, or pass fullgraph=False for a list of graphs",
            ("fullgraph=False",),
        ) from error
    # Dynamo's text begins with the class of the inner error, which the message states anyway.
    raised_by = type(_inner(error)).__name__
    first = first.split(f"{raised_by}: ", 1)[-1] if _inner(error) is not error else first
    raise CaptureError(
        f"'{name}' failed while it was traced{where}: {raised_by}: {first[:600].rstrip('.!')}",
        WITHOUT_REMAT.format(backend="aot_eager")
        if plainly is not None and raises_alike(error, plainly)
        else "",
    ) from error


def takes_lock(error: Exception) -> bool:
    """Return whether tracing failed because the code acquires a lock of `threading`."""
    if type(error).__name__ != "Unsupported":
        return False
    return re.search(r"enter a `R?[lL]ock` context manager", str(error)) is not None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that cause, and so on."""
    while error is not None:
        yield error
        # Dynamo raises its wrapper `from None`, so the original error is in `inner_exception` only.
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _asks_for_numbers(error: BaseException) -> bool:
    """Return whether tracing ended because the code needs the value of a tensor."""
    kinds = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
    return any(type(cause).__name__ in kinds for cause in _causes(error))


def raised_at(error: BaseException) -> str:
    """Return the innermost user line in an error's traceback as `` at file:line``; an empty text if there is none."""
    # Both PyTorch and this folder are between the user's line and the error.
    ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _at(user_frame(f for f in frames if not f.filename.startswith(ours)))


def _user_line(text: str) -> str:
    """Return the innermost user line in Dynamo's error text as `` at file:line``; an empty text if there is none."""
    tail = text.split("from user code:")[-1] if "from user code:" in text else ""
    return _at(user_frame(frames_of(tail)))


def _at(frame: traceback.FrameSummary | None) -> str:
    return "" if frame is None else f" at {frame.filename}:{frame.lineno}"

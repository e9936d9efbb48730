"""The errors that remat raises. One root, few leaves; every message says what, got, expected, what to do.

And the one way in which it warns.
"""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar


class RematError(Exception):
    """Root of all errors that remat raises on purpose.

    Attributes:
        option: the option that cannot be meant, where the error was raised as options were read.
    """

    option: str = ""


class ProblemError(RematError, ValueError):
    """A problem, budget or option that cannot be meant: wrong type, sign or range."""


class BudgetError(ProblemError):
    """A budget that cannot be read, or that no plan can meet."""


class SolverError(RematError):
    """A solver that is unknown, cannot run here, refused the problem, or answered wrongly.

    Attributes:
        solver: name of the solver, as registered.
        problem: the problem at which it crashed or that it answered wrongly; None where it was not
            run.
    """

    def __init__(self, solver: str, message: str, problem: object = None) -> None:
        super().__init__(message)
        self.solver = solver
        self.problem = problem


class RefusalError(SolverError):
    """A solver does not take a problem: it has too many nodes for it, or larger sums than it can hold."""


class PluginError(RematError):
    """A plugin that cannot be loaded, or that registers something unusable."""


class TorchVersionError(RematError):
    """A version of PyTorch that lacks something private that remat needs."""


class CaptureError(RematError):
    """A model whose training step cannot be captured as joint graphs.

    Attributes:
        reason: the message without the advice to call `remat.capture` in another way.
        remedies: the arguments of `remat.capture` that the advice is about, such as ``"run=True"``.
    """

    def __init__(self, reason: str, advice: str = "", remedies: Sequence[str] = ()) -> None:
        super().__init__(f"{reason}. {advice}" if advice else reason)
        self.reason = reason
        self.remedies = tuple(remedies)


class PlanError(RematError):
    """A plan that does not fit the graph it is applied to, or a graph that cannot be partitioned."""


class PolicyError(RematError):
    """A checkpointing policy that raised, answered wrongly, or cannot be followed safely."""


class RereadError(RematError, RuntimeError):
    """An output of a step was written to before backward, which reads it again."""


class VerifyError(PlanError):
    """Forward and backward break a rule of the verifier: a pass is at fault, not the user."""


class PassError(RematError):
    """A pass that failed.

    Attributes:
        pass_name: the pass that failed.
        completed: names of the passes that had run before it, in order.
        found_by: what an instrument was checking that found it; empty where it failed by itself.
    """

    def __init__(
        self, pass_name: str, message: str, completed: Sequence[str] = (), found_by: str = ""
    ) -> None:
        ran = ", ".join(completed) if completed else "none"
        super().__init__(
            f"pass '{pass_name}' failed: {message} (passes completed before it: {ran})"
        )
        self.pass_name = pass_name
        self.completed = tuple(completed)
        self.found_by = found_by


class BudgetWarning(UserWarning):
    """A budget whose meaning may surprise the user."""


class PeakWarning(UserWarning):
    """A peak differs from the expected effect of a plan.

    A plan under a budget on what is saved peaks higher than the one that may save everything, or memory is not counted.
    """


def append_message(error: BaseException, text: str) -> None:
    """Adds a sentence to the message of an error, so that it is seen wherever that is shown."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    else:
        error.add_note(text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def summary(error: BaseException) -> str:
    """The class of an error, and the first line of its message where there is one."""
    kind, first = type(error).__name__, first_line(error).rstrip(".")
    return kind if first == kind else f"{kind}: {first}"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean 'adam'?`` with the known name that is nearest to a mistyped one; empty if none is near.

    Args:
        name: what was typed.
        known: the names that there are.
        prefix: what stands before a name where it is typed.
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{prefix}{near[0]}'?" if near else ""


#: A warning as it was given: its text and its class.
Warned = tuple[str, type[Warning]]
#: The lists that warnings are noted in, innermost last; each thread and each task has its own.
_RECORDED: ContextVar[tuple[list[Warned], ...]] = ContextVar("_RECORDED", default=())

#: Whether `warn` says nothing.
_SUPPRESSED: ContextVar[bool] = ContextVar("_SUPPRESSED", default=False)


def warn(text: str, category: type[Warning], *, stacklevel: int = 1) -> None:
    """Warns as `warnings.warn` does, and notes it for who is `record_warnings`, shown or not."""
    if _SUPPRESSED.get():
        return
    for noted in _RECORDED.get():
        noted.append((text, category))
    warnings.warn(text, category, stacklevel=stacklevel + 1)


@contextlib.contextmanager
def record_warnings() -> Iterator[list[Warned]]:
    """Record the warnings of `warn` in this thread, regardless of warning filters."""
    noted: list[Warned] = []
    token = _RECORDED.set((*_RECORDED.get(), noted))
    try:
        yield noted
    finally:
        _RECORDED.reset(token)


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress `warn` in this thread, for trial plans that may be discarded."""
    token = _SUPPRESSED.set(True)
    try:
        yield
    finally:
        _SUPPRESSED.reset(token)

"""Errors and warnings of remat.

All errors derive from `RematError`. Every error message names the argument, its value, the expected
values, and a remedy. All warnings are given through `warn`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar


class RematError(Exception):
    """Root of all errors that remat raises on purpose.

    Attributes:
        option: name of the option that the error is about; empty if the error concerns no option.
    """

    option: str = ""

    def __init__(self, *args: object, option: str = "") -> None:
        super().__init__(*args)
        if option:  # otherwise the class attribute applies, as it does if `__init__` did not run
            self.option = option


class ProblemError(RematError, ValueError):
    """Raised if a problem, budget or option is invalid, for example if its type, sign or range is wrong."""


class BudgetError(ProblemError):
    """Raised if a budget cannot be parsed, or if no plan meets it."""


class SolverError(RematError):
    """Raised if a solver is unknown, cannot run here, refuses the problem, or answers wrongly.

    Attributes:
        solver: registered name of the solver.
        problem: the problem that the solver crashed on or answered wrongly; None if the solver did
            not run.
    """

    def __init__(self, solver: str, message: str, problem: object = None) -> None:
        super().__init__(message)
        self.solver = solver
        self.problem = problem


class RefusalError(SolverError):
    """Raised if a solver refuses a problem that is too large for that solver."""


class PluginError(RematError):
    """Raised if a plugin cannot be loaded, or registers an unusable object."""


class TorchVersionError(RematError):
    """Raised if the installed PyTorch is too old, or lacks a private name that remat needs."""


class CaptureError(RematError):
    """Raised if the training step of a model cannot be captured as joint graphs.

    Attributes:
        reason: the message without advice.
        remedies: arguments of `remat.capture` that the advice suggests, such as ``"run=True"``.
    """

    def __init__(self, reason: str, advice: str = "", remedies: Sequence[str] = ()) -> None:
        super().__init__(f"{reason}. {advice}" if advice else reason)
        self.reason = reason
        self.remedies = tuple(remedies)


class PlanError(RematError):
    """Raised if a saved plan does not fit the graph to plan, or if a graph cannot be partitioned."""


class PolicyError(RematError):
    """Raised if a checkpointing policy raises, returns a wrong answer, or cannot be followed safely."""


class RereadError(RematError, RuntimeError):
    """Raised by backward if the user overwrote an output of the step, and backward must read this output."""


class RecomputeError(RematError, RuntimeError):
    """Raised by backward under ``check="recomputed"`` if a recomputed branch value differs from forward's value."""


class VerifyError(PlanError):
    """Raised if a pass leaves a forward or backward graph that breaks a rule of the verifier."""


class PassError(RematError):
    """Raised if a pass fails.

    Attributes:
        pass_name: name of the failed pass.
        completed: names of the passes that ran before the failed pass, in order.
        found_by: kind of the check that found a fault in the pass's result: ``"structure"`` or
            ``"numbers"``, as in the option ``--verify-each``. Empty if no such check found it.
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
    """Warning that a step exceeds its budget, or that a budget or a policy has less effect than expected."""


class PeakWarning(UserWarning):
    """Warning that a plan does not lower a step's peak as expected, or that a computed peak leaves out memory.

    A plan under a budget on saved bytes may have a peak as high as the plan at budget 1. A plan made for a point of a
    frontier may have a higher peak than the frontier states for that point. A computed peak may leave out memory that
    operators allocate internally. Without the solvers' compiled C++ module, remat finds costlier plans for a budget
    on the peak.
    """


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Set the attribute ``option`` of each `RematError` that the ``with`` block raises."""
    try:
        yield
    except RematError as error:
        error.option = option
        raise


def append_message(error: BaseException, text: str) -> None:
    """Append a line to the message of an error."""
    if not error.args:
        error.args = (text,)
    elif isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    else:  # no text to append to; tracebacks show notes
        error.add_note(text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the class name if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def summary(error: BaseException) -> str:
    """Return ``Class: message`` for an error, with the message's first line; only the class if there is no message."""
    kind, first = type(error).__name__, first_line(error).rstrip(".")
    return kind if first == kind else f"{kind}: {first}"


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the text ``; did you mean 'adam'?`` for a misspelt name; empty if no known name is similar.

    Args:
        name: the misspelt name.
        names: all valid names.
        prefix: text to put before the suggested name, such as ``"hf:"``.
    """
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{prefix}{near[0]}'?" if near else ""


#: Text and class of a warning.
Warned = tuple[str, type[Warning]]
#: The lists that `record_warnings` yielded and that `warn` appends to, innermost last.
#: Each thread and each asyncio task has its own value of this context variable.
_RECORDED: ContextVar[tuple[list[Warned], ...]] = ContextVar("_RECORDED", default=())

#: Packages whose code is not the user's, although it may lie between the user's call and `warn`.
_NOT_USERS = {"remat", "torch", "contextlib", "functools"}

#: Whether `warn` does nothing; see `suppress_warnings`.
_SUPPRESSED: ContextVar[bool] = ContextVar("_SUPPRESSED", default=False)


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the user's code, and append the warning to the lists of `record_warnings`."""
    if _SUPPRESSED.get():
        return
    # This comes before `warnings.warn`, which raises under the filter "error".
    for recorded in _RECORDED.get():
        recorded.append((text, category))
    warnings.warn(text, category, stacklevel=levels_to_user())


@dataclass(slots=True)
class LastWarning:
    """Number of bytes in the last warning about a step; remat warns again only if the step takes more bytes.

    Attributes:
        nbytes: the bytes that the last warning named; 0 before the first warning.
    """

    NEXT: ClassVar[str] = "Another warning follows only if it takes over 10% more"

    nbytes: int = 0

    @property
    def quiet(self) -> int:
        """Number of bytes up to which a step causes no further warning: 1.1 times the number in the last warning."""
        return self.nbytes + self.nbytes // 10


def levels_to_user() -> int:
    """Return the ``stacklevel`` with which the caller's `warnings.warn` names the innermost line of the user's code."""
    frame, level = inspect.currentframe(), 0
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    return level


@contextlib.contextmanager
def record_warnings() -> Iterator[list[Warned]]:
    """Record all warnings that `warn` gives in this thread, even those that Python's warning filters hide.

    Yields:
        A list to which `warn` appends text and class of each warning.
    """
    recorded: list[Warned] = []
    token = _RECORDED.set((*_RECORDED.get(), recorded))
    try:
        yield recorded
    finally:
        _RECORDED.reset(token)


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Make `warn` do nothing in this thread within the ``with`` block, which tries a plan that may be discarded."""
    token = _SUPPRESSED.set(True)
    try:
        yield
    finally:
        _SUPPRESSED.reset(token)

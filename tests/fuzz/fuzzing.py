"""Random programs by the hundred, in portions that can be run again by their number."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.strategies import SearchStrategy

import remat
from tests.fuzz.cases import Case, cases
from tests.fuzz.check import SEEN, check
from tests.fuzz.draw import WRITTEN
from tests.fuzz.whole import Step, check_step, whole_steps


class Fresh(HypothesisProvider):
    """Draws as Hypothesis does, and every program anew.

    Its own engine makes most examples by changing parts of earlier ones, which would be the same
    program under another pipeline more often than not.
    """


AVAILABLE_PROVIDERS["fresh"] = f"{__name__}.{Fresh.__name__}"

#: Programs of a portion, how many of them Dynamo traces, with checkpointed regions, and how many run as whole steps.
PORTION, TRACED, WHOLE = 50, 3, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What came of one portion.

    Attributes:
        number: its number, which all that is drawn follows from.
        seen: what was seen, by name.
        written: how often each operator was written.
        different: how many programs there are, the same ones counted once.
        fault: what went wrong, with the least program that shows it; None where nothing did.
    """

    number: int
    seen: Counter[str]
    written: Counter[str]
    different: int
    fault: str | None = None


def run_portion(
    number: int,
    *,
    programs: int = PORTION,
    traced: int = TRACED,
    whole: int = 0,
    lower: str = "eager",
    shrink: bool = True,
) -> Portion:
    """Draws and checks programs.

    Args:
        number: what all that is drawn follows from.
        programs: how many.
        traced: how many of them Dynamo traces.
        whole: how many of them run as whole steps.
        lower: the lowering of these.
        shrink: look for a smaller program that fails alike, for five minutes at most.
    """
    SEEN.clear()
    WRITTEN.clear()
    fault: str | None = None
    sources: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", remat.PeakWarning)
        # PyTorch gives this one once, of the first tensor with gaps in a process.
        warnings.filterwarnings("ignore", message=r"torch\.searchsorted")
        # At another size, the two parts of a chunk may differ by one row.
        warnings.filterwarnings("ignore", message="Using a target size")
        warnings.filterwarnings("ignore", message=r"var(_mean)?\(\): degrees of freedom")
        for drawn, examples in (
            (cases(), programs - traced - whole),
            (cases(dynamo=True), traced),
            (whole_steps(lower=lower), whole),
        ):
            if not examples:
                continue
            try:
                sources |= check_programs(number, examples, drawn, shrink=shrink)
            except Exception as group:
                # Hypothesis wraps what fails on one run and not on the next, such as a warning that is given once.
                error = next(iter(getattr(group, "exceptions", [])), group)
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{last.filename}:{last.lineno}: {last.line}"
                notes = "\n".join(getattr(error, "__notes__", []))
                fault = f"{type(error).__name__}: {error}\n{where}\n{notes}"
                break
    return Portion(
        number=number,
        seen=Counter(SEEN),
        written=Counter(WRITTEN),
        different=len(sources),
        fault=fault,
    )


def check_programs(
    number: int, examples: int, drawn: SearchStrategy[Case | Step], *, shrink: bool
) -> set[str]:
    """Checks programs, raises what fails, and returns what was checked."""
    sources: set[str] = set()

    @seed(number)
    @settings(
        max_examples=examples,
        backend="fresh",
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
    )
    @given(drawn)
    def one(case: Case | Step) -> None:
        sources.add(case.program.source)
        check_step(case) if isinstance(case, Step) else check(case)

    one()
    return sources


def begin_worker() -> None:
    """One thread for each worker; Dynamo's remarks on checkpointing are no news."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

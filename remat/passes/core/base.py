"""What a pass is.

A pass is a frozen dataclass: its fields are its options, so printing, parsing and help come free.
It is given a `State` and returns a `PassResult`; it never keeps anything of a run on itself.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from remat.passes.core.pipeline_text import write_call
from remat.passes.core.state import PassResult, State


class Stage(enum.IntEnum):
    """Where in a pipeline a pass belongs; stages may not go back."""

    ANY = 0
    JOINT = 1
    DECIDE = 2
    PARTITION = 3
    SPLIT = 4


class Pass(ABC):
    """Base of passes: subclass it as a frozen dataclass and implement `run`.

    Attributes:
        name: kebab-case name in pipelines.
        stage: where in a pipeline it may stand.
        not_after: names of passes that it must not follow, each with the reason.
        optional: whether a pipeline is right without it; bisection never leaves out one that is not.
        keeps_numbers: whether the step computes the same, bit for bit, before and after it.
        summary: one line for ``remat passes``.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.ANY
    not_after: ClassVar[Mapping[str, str]] = {}
    optional: ClassVar[bool] = True
    keeps_numbers: ClassVar[bool] = True
    summary: ClassVar[str] = ""

    @abstractmethod
    def run(self, state: State) -> PassResult:
        """Runs the pass. It may change the graphs of ``state`` in place, inside ``state.edit()``."""

    def __str__(self) -> str:
        return write_call(self)

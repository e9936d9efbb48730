"""The `Pass` base class, and the stages of a pipeline.

A pass is a frozen dataclass whose fields are its options, so printing, parsing and help need no
code in the pass. `Pass.run` takes a `State` and returns a `PassResult`. A pass never stores data of
a run in its own attributes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from remat.passes.core.pipeline_text import write_call
from remat.passes.core.state import PassResult, State


class Stage(enum.IntEnum):
    """One of the stages of a pipeline; every pass belongs to one stage.

    A pass may not run after a pass of a later stage, unless the stage of one of these passes is `ANY`.

    Attributes:
        ANY: the pass may run at any position.
        JOINT: the pass analyses or changes the joint graph.
        DECIDE: the pass chooses which values are saved.
        PARTITION: the pass splits the joint graph into a forward and a backward graph.
        SPLIT: the pass works on the forward and the backward graph.
    """

    ANY = 0
    JOINT = 1
    DECIDE = 2
    PARTITION = 3
    SPLIT = 4


class Pass(ABC):
    """Base class of passes. A subclass is a frozen dataclass that implements `run`.

    The command ``remat passes`` shows the first line of the docstring of a subclass.

    Attributes:
        name: kebab-case name of the pass in the text of a pipeline.
        stage: stage of a pipeline to which the pass belongs.
        not_after: names of passes after which this pass must not run, each mapped to the reason.
        optional: whether a pipeline stays correct without the pass. Bisection never skips a pass
            with ``optional=False``.
        keeps_numbers: whether the pass leaves all results of the step bit for bit the same.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.ANY
    not_after: ClassVar[Mapping[str, str]] = {}
    optional: ClassVar[bool] = True
    keeps_numbers: ClassVar[bool] = True

    @abstractmethod
    def run(self, state: State) -> PassResult:
        """Run the pass on ``state``, and return a result that has the new state.

        The pass may change the graphs of ``state`` in place, but only inside ``with state.edit()``.
        """

    def __str__(self) -> str:
        return write_call(self)

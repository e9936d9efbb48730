"""Define problem instances: problems with a description of their origin, stored in files that contain no code."""

from __future__ import annotations

import os
from dataclasses import dataclass

from remat.errors import ProblemError
from remat.files import read_as, write_file
from remat.solvers.base import AnyProblem
from remat.solvers.columns import integer
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.instances import file_format as form
from remat.solvers.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem with a description of its origin.

    Attributes:
        name: name of the instance.
        problem: the problem. The ``unit`` of a graph problem must equal ``unit`` below.
        full_bytes: the bytes to which a budget ratio refers. For a graph problem, these are the
            bytes that the runtime-optimal partition saves (see docs/concepts.md). None for other
            kinds: for a knapsack, a budget ratio refers to the weight of all items; for a schedule
            problem, to the peak of the schedule that runs each node once in the problem's order.
        least_bytes: for a graph problem, the fewest bytes that any plan saves; None for other kinds.
        cost: the cost model behind the costs or values, such as ``"roofline:h100"``.
        unit: unit of the costs or values.
        source: description of the model and input behind the problem, for readers.

    Raises:
        ProblemError: an attribute is invalid; the message names it.
    """

    name: str
    problem: AnyProblem
    full_bytes: int | None = None
    least_bytes: int | None = None
    cost: str = ""
    unit: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for label in ("name", "cost", "unit", "source"):
            form.text_of(label, getattr(self, label))
        if not self.name:
            raise ProblemError("name is empty; expected what to call the instance")
        if not isinstance(self.problem, Problem):
            raise ProblemError(
                f"problem is a {type(self.problem).__name__}; expected a GraphProblem, a "
                "KnapsackProblem or a ScheduleProblem"
            )
        for i, name in enumerate(getattr(self.problem, "names", ())):
            form.text_of(f"names[{i}]", name)
        if isinstance(self.problem, GraphProblem):
            self._check_graph(self.problem)
            return
        for label in ("full_bytes", "least_bytes"):
            if getattr(self, label) is not None:
                raise ProblemError(
                    f"{label} is {getattr(self, label)!r}; a {self.kind} has none: leave it out"
                )

    def _check_graph(self, problem: GraphProblem) -> None:
        if self.unit != problem.unit:
            raise ProblemError(
                f"unit is '{self.unit}', but the problem's costs are in '{problem.unit}'; give that"
            )
        least = integer("least_bytes", self.least_bytes)
        full_bytes = integer("full_bytes", self.full_bytes)
        if least > full_bytes:
            raise ProblemError(
                f"full_bytes is {full_bytes}; expected no less than least_bytes, {least}"
            )

    @property
    def kind(self) -> str:
        """Kind of the problem: ``"graph"``, ``"knapsack"`` or ``"schedule"``."""
        return self.problem.kind

    def to_json(self) -> str:
        """Convert the instance to JSON text; equal instances give equal text."""
        return form.dump({key: getattr(self, key) for key in form.HEAD}, self.problem)

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Parse the result of `to_json`, or a published graph in networkx's node-link JSON.

        Raises:
            ProblemError: the text is not a complete instance of this version, has unknown keys, or
                has an invalid entry. The message names the fault in one line.
        """
        head, problem = form.parse(text)
        return cls(problem=problem, **head)


def save_instance(path: str | os.PathLike[str], instance: Instance) -> None:
    """Write an instance to a file atomically.

    Raises:
        ProblemError: ``instance`` is not an `Instance`, or the file would be too large to be read
            again.
        RematError: the file cannot be written; an existing file stays unchanged.
    """
    if not isinstance(instance, Instance):
        raise ProblemError(
            f"instance is a {type(instance).__name__}; expected an Instance: save_instance(path, instance)"
        )
    text = instance.to_json()
    nbytes = len(text.encode())
    if nbytes > form.MAX_BYTES:
        raise ProblemError(
            f"instance '{path}' would take {nbytes} bytes; at most {form.MAX_BYTES} are read"
        )
    write_file(path, text, "instance")


def load_instance(source: str | os.PathLike[str]) -> Instance:
    """Read an instance from a file, without running code from the file.

    Published graphs in networkx's node-link JSON are read as schedule problems. Files of more than 128 MiB
    are refused.

    Args:
        source: a path, or the JSON text itself: a ``str`` that starts with ``{``.

    Raises:
        ProblemError: the file does not exist or does not hold an instance; the message is one line.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return Instance.from_json(source)
    return read_as("instance", source, Instance.from_json, form.MAX_BYTES)

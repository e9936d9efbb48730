"""Instances: problems with their origin, as files that hold data only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from remat.errors import ProblemError, RematError
from remat.files import read_as, write_atomic, writing
from remat.solvers import instance_format as form
from remat.solvers.base import AnyProblem
from remat.solvers.columns import integer
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem with its source.

    Attributes:
        name: what to call it.
        problem: the problem; a graph's ``capacity`` may be None, and its ``unit`` is `unit`.
        full_bytes: bytes that the runtime-optimal partition saves; a ratio budget is a share of them.
            None for a knapsack, where a ratio is a share of the weight of all items, and for a step,
            where it is a share of the peak of the given order.
        least_bytes: the least bytes that any plan saves. None for a knapsack and a step.
        cost: the cost model behind the costs or values, such as ``"roofline:h100"``.
        unit: unit of the costs or values.
        source: what the problem was made from, for people.

    Raises:
        ProblemError: an attribute is not what it must be; the message names it.
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
        form.few("names", range(len(self.problem)))
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
        full = integer("full_bytes", self.full_bytes)
        if least > full:
            raise ProblemError(f"full_bytes is {full}; expected no less than least_bytes, {least}")

    @property
    def kind(self) -> str:
        """``"graph"``, ``"knapsack"`` or ``"schedule"``."""
        return self.problem.kind

    def to_json(self) -> str:
        """The instance as JSON; equal instances give equal texts."""
        return form.dump({key: getattr(self, key) for key in form.HEAD}, self.problem)

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Parse the result of `to_json`.

        Raises:
            ProblemError: the text is no instance, cut off, of another version, has unknown keys or
                too many nodes, or an entry that cannot be meant; one line names it.
        """
        head, problem = form.parse(text)
        return cls(problem=problem, **head)


def save_instance(path: str | os.PathLike[str], instance: Instance) -> None:
    """Writes an instance to a file, whole or not at all.

    Raises:
        ProblemError: this is no instance, or the file would be larger than what can be read again.
        RematError: the file cannot be written; what was there before is as it was.
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
    with writing(path, what="instance", error=RematError):
        write_atomic(Path(path), text)


def load_instance(source: str | os.PathLike[str]) -> Instance:
    """Reads an instance from a file; nothing in a file can run.

    Graphs that others have published as networkx's node-link JSON are read as step problems.

    A million nodes take seconds; more, or more than 128 MiB, are refused.

    Args:
        source: a path, or the text itself: a ``str`` that starts with ``{``.

    Raises:
        ProblemError: there is no such file, or it holds no instance; one line says why.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return Instance.from_json(source)
    return read_as("instance", source, Instance.from_json, form.MAX_BYTES)

"""Plan each graph that an unedited script compiles with Inductor, for the command ``remat run``.

The command ``remat run`` starts the script in an environment in which PyTorch calls `install` at the end of ``import
torch``. Python processes that the script starts inherit the environment.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from remat import torch_compat
from remat.units import counted

#: Name of the environment variable that holds the settings as JSON: ``options``, the options of planning by name, and
#: ``pid``, the process of the script itself.
SETTINGS = "REMAT_RUN"
#: Number of plans that the report lists, few enough to leave the script's own last lines on the screen.
MOST_LINES = 8


@dataclass(slots=True)
class Compilations:
    """Numbers of calls of ``torch.compile`` for Inductor in this process, and of graphs that Dynamo sent to Inductor.

    Attributes:
        options: remat's options of planning by name.
        calls: number of calls of ``torch.compile`` with Inductor.
        graphs: number of graphs that Dynamo sent to Inductor, and hence to remat.
        compiled: number of these graphs that were compiled; an error refused the others.
    """

    options: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    graphs: int = 0
    compiled: int = 0

    def report(self) -> list[str]:
        """Return lines about this process's plans, or the reason why there are none; no line ends with a full stop."""
        if not self.graphs:
            head = "no graph was compiled through remat in this process; processes that it starts report theirs"
            return [f"{head}. Reason: {self._why()}"]
        from remat.integrations.compile_log import plans
        from remat.integrations.compile_progress import closing_line

        planned = plans()
        lines = [
            f"{counted(self.compiled, 'graph')} compiled, {counted(len(planned), 'plan')} made"
        ]
        if self.compiled < self.graphs:
            lines[0] += f", {counted(self.graphs - self.compiled, 'graph')} refused by an error"
        elif not planned:
            lines[0] += ", because no graph computes gradients"
        lines += [closing_line(plan) for plan in planned[:MOST_LINES]]
        if len(planned) > MOST_LINES:
            lines.append(f"{len(planned) - MOST_LINES} more: remat.plans() in the script lists all")
        return lines

    def _why(self) -> str:
        """Return the reason why no graph was compiled through remat, and advice, as text."""
        if not self.calls:
            return (
                "the script calls torch.compile nowhere, or names another backend, or its call raised an error; compile the "
                "model by torch.compile(model), whose backend is 'inductor', or set the trainer's flag, such as "
                "TrainingArguments(torch_compile=True)"
            )
        if os.environ.get("TORCHDYNAMO_DISABLE", "0") == "1":
            return "the environment variable TORCHDYNAMO_DISABLE is 1, so PyTorch compiles nothing; unset it"
        return (
            f"the script calls torch.compile ({counted(self.calls, 'call')}), but Dynamo compiled no graph. Either the "
            "compiled model never ran, or torch.compiler.set_stance says 'force_eager', or Dynamo skips it: write DDP(torch.compile(model)) instead of "
            "torch.compile(DDP(model)), and torch.compile(model) instead of model.compile() if the model's class is "
            "PyTorch's own, such as nn.Sequential"
        )


#: Counts of the calls of ``torch.compile`` in this process.
COMPILATIONS = Compilations()


class PlannedInductor(torch_compat.CompileWithInductor):
    """Backend that ``torch.compile`` creates for Inductor: remat plans each graph, then Inductor compiles it.

    The base class, which is PyTorch's, checks ``mode`` and ``options``, and merges them into the settings ``config``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        COMPILATIONS.calls += 1
        # One dict for all graphs, because `compile_step` makes a backend for each dict.
        self._options = COMPILATIONS.options | self.config

    def __call__(
        self,
        model_: fx.GraphModule,
        inputs_: Sequence[Any],
        *,
        config_patches: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        from remat.integrations.backend import compile_step

        COMPILATIONS.graphs += 1
        options = self._options | config_patches if config_patches else self._options
        compiled = compile_step(model_, inputs_, options=options)
        COMPILATIONS.compiled += 1
        return compiled


def install() -> None:
    """Make ``torch.compile`` plan each graph that it compiles with Inductor; at exit, print what was planned.

    `install` does nothing in a process whose environment lacks the settings of ``remat run``.
    """
    if SETTINGS not in os.environ:
        return
    settings = json.loads(os.environ[SETTINGS])
    COMPILATIONS.options = settings["options"]
    torch_compat.replace_inductor(PlannedInductor)
    atexit.register(_print_report, is_script=os.getpid() == settings["pid"])


def _print_report(*, is_script: bool) -> None:
    """Print the report of this process; a process that the script started prints one only if it compiled graphs."""
    if sys.stderr is not None and (is_script or COMPILATIONS.graphs):
        rank = os.environ.get("RANK")
        process = f"rank {rank}" if rank else "" if is_script else f"process {os.getpid()}"
        head = ", ".join(filter(None, ["remat run", process]))
        for line in COMPILATIONS.report():
            print(f"{head}: {line}", file=sys.stderr)

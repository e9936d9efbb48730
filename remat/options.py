"""Declare the options of planning and of `remat.fit`, with their names, types, defaults and documentation.

Each option is a field of `PlanOptions` or `Training`. Entry points such as `remat.plan` take options as keywords, which
typed dicts in this file declare. remat's commands have options of the same names. This file imports PyTorch for type
checkers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Required, TypeAlias, TypedDict

from remat.arguments import BUDGET, COST, SOLVER

if TYPE_CHECKING:
    import torch

    from remat.graph.costs import CostModel
    from remat.graph.costs.links import Link
    from remat.graph.policies import Policies
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.joint.chunk_loss import ChunkLoss
    from remat.passes.packing.pairs import Pack, SavedTensorHooks, Unpack
    from remat.running.optimizer import Make
    from remat.solvers.base import Solver
    from remat.units import AnyBudget


#: Default rate in GB/s at which one rank sends: NVLink of an H100 in one direction, by the data sheet.
LINK_GBPS = 450.0


class JsonRecord(Protocol):
    """Type of a `remat.Plan` or a `remat.PlanSet`, as a protocol that needs no import of these classes."""

    def to_json(self) -> str:
        """Return the plan, or the set of plans, as JSON text."""


SolverOption: TypeAlias = "str | Solver"
CostOption: TypeAlias = "str | CostModel"
HooksOption: TypeAlias = "str | tuple[Pack, Unpack] | SavedTensorHooks | None"
OffloadOption: TypeAlias = "str | float | Link | None"
PoliciesOption: TypeAlias = "Mapping[str, Any] | str | Iterable[str] | Policies | None"
ChunkOption: TypeAlias = "int | str | ChunkLoss | None"
SavedPlan: TypeAlias = "JsonRecord | str | Path | None"


class ValueOptions(TypedDict, total=False):
    """Options for the values of a training step, which every entry point takes by keyword."""

    offload: OffloadOption
    host_memory: str | int | None
    policies: PoliciesOption
    chunk: ChunkOption


class TrainingOptions(TypedDict, total=False):
    """Options that say how a model is trained, as keywords of `remat.fit`: the fields of `Training`."""

    memory: Required[str | int]
    margin: str | float
    optimizer: str | Make
    batches: str | int | Iterable[int]
    accumulate: int
    ranks: int
    fsdp: bool
    link_gbps: float
    lower: str
    device: str | torch.device | None


class FitOptions(TrainingOptions, ValueOptions, total=False):
    """Options that `remat.fit` takes by keyword, for planning and for training."""


class StepOptions(ValueOptions, total=False):
    """Options of planning that `remat.frontier` and `remat.compare` take by keyword."""

    reread_inputs: bool


class CompileOptions(StepOptions, total=False):
    """Options of planning that `remat.backend` and `remat.partitioner` take by keyword."""

    plan: SavedPlan
    pipeline: str | Pipeline | None
    hooks: HooksOption


class KeywordOptions(CompileOptions, total=False):
    """Options that `remat.plan` takes by keyword only."""

    count_outputs: bool
    isolation: str | None


class PlanOptionsDict(KeywordOptions, total=False):
    """All options of planning by name: the fields of `PlanOptions`."""

    budget: AnyBudget
    solver: SolverOption
    cost: CostOption
    time_limit: float | None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a user may ask for when planning; each entry point takes some of these options as keywords.

    The first sentence about each option is also the help text of the command's option with that name.

    Attributes:
        budget: a limit on the peak of the step (``40GiB``, or ``peak:0.5``, where 0 is the least
            peak found and 1 the peak at budget 1) or on the saved activations (``saved:8GiB``, or a
            ratio from 0 to 1). In Python, an int above 1, text such as ``"40GiB"``, or
            ``remat.Peak("40GiB")`` limits the peak of the step in bytes, and ``remat.Peak(0.5)``
            limits it by a ratio. ``remat.Saved("8GiB")`` limits the bytes of saved activations. A
            number from 0 to 1, by default 1, limits the saved bytes to this ratio of the bytes that
            the runtime-optimal partition saves. If a ratio allows fewer bytes than any plan can
            save, the limit is the fewest bytes that a plan can save. A `remat.Saved` budget below
            these fewest bytes raises an error. A plain ratio and `remat.Saved` do not limit the
            peak. If a plan under such a budget does not lower the peak, a `remat.PeakWarning` says
            so.
        solver: the solver that chooses what is saved: a name that ``remat solvers`` lists, or
            ``module:Class``. In Python, also a `remat.Solver`. A solver of graph problems decides on
            the whole graph; any other solver decides on knapsack problems, whose items are tensors
            of the graph. A named solver decides alone. ``"auto"`` takes the best plan that several
            solvers propose.
        cost: the cost model: a name that ``remat costs`` lists; ``roofline-fused:a100`` names a
            device.
        time_limit: seconds for each call of the solver; by default there is no limit, and solvers
            limit their work instead.
        plan: saved plans to apply instead of deciding again: a `Plan` or `PlanSet`, its JSON text,
            or a path to the JSON file. A graph without a saved plan is planned under ``budget`` if
            ``budget`` is given too; otherwise such a graph raises an error.
        pipeline: passes to run instead of the default ones, as text or as a pipeline; see
            `remat.default_pipeline`. The budget, the solver and the cost model are options of
            these passes, so they cannot be given as arguments too.
        count_outputs: whether forward's outputs that backward reads count as saved bytes; by
            default they do not.
        hooks: the pair of saved-tensor hooks that pack saved values after forward and unpack them in
            backward: ``bf16``, ``float8``, ``int8`` or ``cpu-offload``. In Python, also functions
            ``(pack, unpack)``, or `remat.SavedTensorHooks`. The decision counts bytes before
            packing, and `Plan.saved_bytes` counts bytes after packing. A budget on the peak limits
            the peak of the step with packed values.
        reread_inputs: whether backward may read all inputs and outputs of the step again; if not,
            they may be overwritten between forward and backward, as in eager PyTorch. If False,
            backward reads only parameters, buffers, and inputs that eager autograd would have saved
            too. A saved plan records this option.
        isolation: ``"process"``: run the solver in a separate process. ``"foreign"``: only if the
            solver is not part of remat. None: run the solver in this process.
        offload: speed of the link to the host, to which saved values may be copied under a budget on
            the peak: ``25GB/s``, ``pcie4``, ``pcie5``, ``nvlink-c2c``, or ``measured`` to time the
            link of the current CUDA device. A value is copied if the copy costs less time than other
            means to meet the budget. `Plan.offloaded` names the copied values. Values that the
            user's code or ``policies`` tags for the host are copied even without ``offload``, and
            their copies are then timed at the speed of ``"pcie4"``.
        host_memory: bytes that copied values may take in host memory at one time, such as ``64GiB``.
        policies: what to do with the values of the modules whose names match a glob: save, recompute
            or offload, as in ``*.mlp=recompute``; the last pattern that matches a module decides. In
            Python, a dict such as ``{"*.self_attn": "save", "*.mlp": "recompute"}``. ``*`` matches
            dots too. A value may also be ``{"budget": remat.Saved("1GiB")}``, or the text
            ``saved:1GiB``. The plan follows the policies at every budget. A saved plan records the
            policies.
        chunk: number of chunks of tokens into which the final linear layer and the loss of a
            language model are split; ``auto`` takes the cheapest of 1, 2, 4, 8 and 16 chunks within
            the budget on the peak. The logits are then never alive as a whole. Gradients may differ
            by rounding from those of the unsplit step. By default the loss is not split.
    """

    budget: AnyBudget = BUDGET
    solver: SolverOption = SOLVER
    cost: CostOption = COST
    time_limit: float | None = None
    plan: SavedPlan = None
    pipeline: str | Pipeline | None = None
    count_outputs: bool = False
    hooks: HooksOption = None
    reread_inputs: bool = True
    isolation: str | None = None
    offload: OffloadOption = None
    host_memory: str | int | None = None
    policies: PoliciesOption = None
    chunk: ChunkOption = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that the user gave, which are those whose value is not the default object itself."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not f.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained, for `remat.fit`.

    The first sentence about each option is also the help text of the command's option with that name.

    Attributes:
        memory: memory that a step may take on the device of one rank, with its unit: ``80GiB``. In Python, also a
            number of bytes.
        margin: part of the memory that the step must leave to the allocator, such as ``5%`` or 0.05.
        optimizer: a class of ``torch.optim``, in upper or lower case, with arguments after a colon:
            ``sgd:momentum=0.9``. In Python, also a callable that makes an optimizer from a list of parameters.
        batches: batch sizes of one rank to try; ``max`` searches for the largest that fits. ``"max"`` tries powers of
            two until one does not fit, then bisects between the last two powers. A largest batch below 100 is exact;
            from 100 on, it may be up to 2 % too small.
        accumulate: number of micro-batches whose gradients are summed before the optimizer steps; each batch size is
            then that of one micro-batch. From the second micro-batch on, the summed gradients are alive during forward
            and backward, too.
        ranks: number of ranks that train together, by FSDP2 if ``fsdp`` is set, else by DDP.
        fsdp: whether the ranks shard parameters, gradients and optimizer state, by FSDP2.
        link_gbps: GB/s that a rank can send. Sending overlaps with computing, so only the longer of the two times
            counts.
        lower: as in `remat.capture`. For ``"inductor"``, peaks are estimates for fused code.
        device: as in `remat.capture`.
    """

    memory: str | int
    margin: str | float = 0.0
    optimizer: str | Make = "adamw"
    batches: str | int | Iterable[int] = "max"
    accumulate: int = 1
    ranks: int = 1
    fsdp: bool = False
    link_gbps: float = LINK_GBPS
    lower: str = "inductor"
    device: str | torch.device | None = None

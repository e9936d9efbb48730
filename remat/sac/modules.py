"""The modules of a model with what a plan over them needs: their operators, and their share of the step's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from remat.errors import ProblemError
from remat.graph.costs import CostModel
from remat.sac.estimator import SACEstimator
from remat.sac.lifetimes import Lifetimes, Span, loss_only, record_step
from remat.sac.stats import SACStats

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallStats:
    """One call of a module in the step. Moments are those of `Lifetimes`.

    Attributes:
        begin: first moment of its forward.
        end: first moment after it.
        back: when backward first asks for something that was saved in it: when it would run again.
        activation_bytes: memory that it makes, does not return, and backward reads.
        input_bytes: inputs that nothing keeps until ``back``, unless the module is checkpointed.
        output_bytes: memory behind what it returned.
        gradient_bytes: by how much memory rises at most from ``back`` to the end of its backward.
        made: bytes alive of all that it made, by moment of its forward.
        freed_at: moment at which each of its operators' memory is made, and at which it is freed;
            None where they cannot be told apart.
    """

    begin: int
    end: int
    back: int
    activation_bytes: int
    input_bytes: int
    output_bytes: int
    gradient_bytes: int
    made: Bytes
    freed_at: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleStats:
    """One module.

    Attributes:
        name: under the class of the outermost module: ``Model.layers.0``.
        parent: position of the module that calls it; -1 for the outermost.
        is_leaf: whether it has no children; such are never checkpointed.
        parameter_bytes: of its parameters, and so of their gradients.
        calls: its calls that have a backward.
        stats: its operators; None for leaves, and for modules whose calls run different ones.
            Other than in `SACEstimator`, results that are returned and that nothing keeps until
            backward have their bytes, and what comes after the last saved tensor takes no time:
            running again stops before it.
        why_not: why it cannot be checkpointed; empty if it can.
    """

    name: str
    parent: int
    is_leaf: bool
    parameter_bytes: int
    calls: tuple[CallStats, ...]
    stats: SACStats | None = field(repr=False)
    why_not: str = ""

    @property
    def fqn(self) -> str:
        """The name as in ``model.named_modules()``; empty for the model itself."""
        return self.name.partition(".")[2]

    @property
    def activation_bytes(self) -> int:
        """Memory that its calls make, do not return, and backward reads."""
        return sum(call.activation_bytes for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleTree:
    """The modules of a model in one training step.

    Attributes:
        modules: in the order in which they are first called: parents before their children.
        post_order: their positions in the order in which they first return.
        other: bytes alive by moment, without parameters and their gradients.
        gradients: bytes of parameters' gradients by moment.
        parameter_bytes: of all parameters.
        forward_end: the first moment of backward.
        step_ms: milliseconds of forward's operators, and twice as much for backward.
        mode: how runtimes were found.
        cost: the cost model.
    """

    modules: tuple[ModuleStats, ...]
    post_order: tuple[int, ...]
    other: Bytes
    gradients: Bytes
    parameter_bytes: int
    forward_end: int
    step_ms: float
    mode: str
    cost: str

    def __getitem__(self, fqn: str) -> ModuleStats:
        """A module by its name, with or without the class of the model in front.

        Raises:
            ProblemError: there is none.
        """
        for module in self.modules:
            if fqn in (module.fqn, module.name):
                return module
        known = ", ".join(m.fqn for m in self.modules[1:9])
        raise ProblemError(f"no module '{fqn}' ran in this step; some that did: {known}")

    def ancestors(self, k: int) -> list[int]:
        """Positions of the modules that a module runs in, innermost first."""
        found, parent = [], self.modules[k].parent
        while parent >= 0:
            found.append(parent)
            parent = self.modules[parent].parent
        return found

    def memory(self, world_size: int = 1) -> Bytes:
        """Bytes alive by moment; parameters and gradients are spread over so many ranks."""
        sharded = self.parameter_bytes + self.gradients
        return self.other + -(-sharded // world_size)

    def peak_bytes(self, world_size: int = 1) -> int:
        """Most bytes alive at once."""
        return int(self.memory(world_size).max(initial=0))


def collect_modules(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "operator-level-cost-model",
    cost: CostModel | None = None,
    fake: bool | None = None,
) -> ModuleTree:
    """Estimates a model: one forward for the operators, one whole step for the memory.

    Args:
        model: in train mode.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        mode: how runtimes are found; see `SACEstimator`.
        cost: another cost model for the mode.
        fake: whether to run on fake tensors, which takes neither memory nor a GPU. Some models run
            other operators then (see `SACEstimator`), and a plan made from those is refused when it
            is applied. None: fake, unless all parameters and inputs lie on the CPU.

    Raises:
        ProblemError: no such mode, or no operator of a module can be estimated.
        CaptureError: no output requires a gradient.
    """
    named = dict(kwargs or {})
    if not isinstance(model, nn.Module):
        raise ProblemError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module: what is checkpointed are "
            "its modules"
        )
    given = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((tuple(args), named))]
    if fake is None:
        fake = any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in given)
    estimator = SACEstimator()
    with contextlib.ExitStack() as stack:
        if fake:
            faker = FakeTensorMode(allow_non_fake_inputs=True)
            args, named = pytree.tree_map_only(
                torch.Tensor, lambda t: _fake(t, faker), (tuple(args), named)
            )
            stack.enter_context(_fake_parameters(model, faker))
            stack.enter_context(faker)
        # Buffers are changed by a real run.
        with _buffers_as_before(model, fake), estimator(mode, cost, fake=fake):
            out = loss_only(model)(*args, **named)
        del out
        lifetimes = record_step(model, args, named)
    return build_tree(model, estimator, lifetimes)


def build_tree(model: nn.Module, estimator: SACEstimator, lifetimes: Lifetimes) -> ModuleTree:
    """Joins what the estimator knows of operators with what is known of memory."""
    table = _Table(lifetimes)
    spans = lifetimes.spans
    order: dict[str, list[Span]] = {}
    for span in spans:
        order.setdefault(span.name, []).append(span)
    places = {name: k for k, name in enumerate(order)}
    parameters = {
        name: sum(p.untyped_storage().nbytes() for p in {id(p): p for p in m.parameters()}.values())
        for name, m in model.named_modules()
    }
    modules = []
    for name, calls in order.items():
        stats = estimator.sac_mod_stats.get(name)
        with_backward = [s for s in calls if s.back_begin >= 0]
        if stats is not None and with_backward:
            stats = table.as_checkpointed(with_backward[0], stats)
        parent = calls[0].parent
        modules.append(
            ModuleStats(
                name=name,
                parent=places[spans[parent].name] if parent >= 0 else -1,
                is_leaf=calls[0].is_leaf,
                parameter_bytes=parameters.get(name.partition(".")[2], 0),
                calls=tuple(table.call(s, stats) for s in with_backward),
                stats=stats,
                why_not=_why_not(name, calls, estimator, lifetimes),
            )
        )
    ended = sorted(order, key=lambda name: (order[name][0].end, -places[name]))
    roots = [s.stats for s in modules if s.parent < 0 and s.stats is not None]
    return ModuleTree(
        modules=tuple(modules),
        post_order=tuple(places[name] for name in ended),
        other=table.other(),
        gradients=table.alive(lifetimes.gradients),
        parameter_bytes=sum(lifetimes.nbytes[k] for k in lifetimes.resident),
        forward_end=lifetimes.forward_end,
        step_ms=3 * sum(sum(s.runtimes) for s in roots),
        mode=estimator.mode,
        cost=str(estimator.cost),
    )


def _why_not(
    name: str, calls: Sequence[Span], estimator: SACEstimator, lifetimes: Lifetimes
) -> str:
    if calls[0].is_leaf:
        return "it has no children"
    if name in estimator.sac_mod_unsteady:
        return estimator.sac_mod_unsteady[name]
    if name not in estimator.sac_mod_stats:
        return "it did not run when operators were estimated"
    if any(s.back_begin < 0 for s in calls):
        return "backward needs nothing that is saved in one of its calls"
    if any(
        s.begin <= lifetimes.born[k] and lifetimes.written.get(k, -1) >= s.end
        for s in calls
        for k in s.outputs
    ):
        return "what it returns is written to after that, and may not be stored then"
    return ""


class _Table:
    """The lives of memories as arrays, for sums over them."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._of = lifetimes
        self._born = np.array(lifetimes.born, dtype=np.int64)
        self._died = np.array(lifetimes.died, dtype=np.int64)
        self._nbytes = np.array(lifetimes.nbytes, dtype=np.int64)
        self._total = self.alive(range(len(self._born)))

    def alive(self, memories: Any) -> Bytes:
        """Bytes alive of some memories, by moment."""
        chosen = np.fromiter(memories, dtype=np.int64)
        change = np.zeros(self._of.moments + 1, dtype=np.int64)
        np.add.at(change, np.maximum(self._born[chosen], 0), self._nbytes[chosen])
        np.subtract.at(change, self._died[chosen], self._nbytes[chosen])
        return np.cumsum(change)[:-1]

    def other(self) -> Bytes:
        """Bytes alive by moment of all but parameters and their gradients."""
        left = self._of.resident | self._of.gradients
        return self.alive([k for k in range(len(self._born)) if k not in left])

    def call(self, span: Span, stats: SACStats | None) -> CallStats:
        made = self._made(span)
        inner = made.copy()
        inner[list(span.outputs)] = False
        crosses = inner & (self._died > span.back_begin)
        lost = [k for k in span.inputs if self._born[k] >= 0 and self._died[k] <= span.back_begin]
        back = self._total[span.back_begin : span.back_end + 1]
        return CallStats(
            begin=span.begin,
            end=span.end,
            back=span.back_begin,
            activation_bytes=int(self._nbytes[crosses].sum()),
            input_bytes=int(self._nbytes[lost].sum()),
            output_bytes=int(self._nbytes[list(span.outputs)].sum()),
            gradient_bytes=int(back.max() - back[0]),
            made=self.alive(np.flatnonzero(made))[span.begin : span.end],
            freed_at=None if stats is None else self._lives(span, stats, made),
        )

    def as_checkpointed(self, span: Span, stats: SACStats) -> SACStats:
        """What a checkpointed call keeps and runs again, by operator."""
        lives = self._lives(span, stats, self._made(span))
        if lives is None:
            return stats
        lost = {
            int(self._born[k]): int(self._nbytes[k])
            for k in sorted(span.outputs)
            if span.begin <= self._born[k] and self._died[k] <= span.back_begin
        }
        moments = [moment for moment, _ in lives]
        return replace(
            stats,
            memory=[n + lost.get(t, 0) for n, t in zip(stats.memory, moments, strict=True)],
            runtimes=[
                ms if t < span.last_saved else 0.0
                for ms, t in zip(stats.runtimes, moments, strict=True)
            ],
        )

    def _made(self, span: Span) -> npt.NDArray[np.bool_]:
        return (self._born >= span.begin) & (self._born < span.end)

    def _lives(
        self, span: Span, stats: SACStats, made: npt.NDArray[np.bool_]
    ) -> tuple[tuple[int, int], ...] | None:
        """When the memory of each operator in the statistics is made and when freed."""
        died = dict.fromkeys(range(span.begin, span.end), -1)
        for k in np.flatnonzero(made).tolist():
            died[int(self._born[k])] = max(died[int(self._born[k])], int(self._died[k]))
        found = []
        ops = iter(span.ops)
        for name in stats.func_names:  # replayed views ran here and are not in the statistics
            moment = next((t for t, op in ops if op == name), None)
            if moment is None:
                return None
            found.append((moment, died[moment] if died[moment] >= 0 else moment + 1))
        return tuple(found)


@contextlib.contextmanager
def _buffers_as_before(model: nn.Module, fake: bool) -> Iterator[None]:
    """A real forward leaves buffers and random generators as they were."""
    if fake:
        yield
        return
    values = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _fake(tensor: torch.Tensor, faker: FakeTensorMode) -> torch.Tensor:
    """A fake of a tensor; of one on the meta device, as if it lay on the CPU.

    Operators choose by device what they run: attention on the meta device is not what runs.
    """
    if not tensor.is_meta or tensor.layout is not torch.strided:
        made: torch.Tensor = faker.from_tensor(tensor)
        return made
    with faker:
        return torch.empty_strided(
            tensor.size(),
            tensor.stride(),
            dtype=tensor.dtype,
            device="cpu",
            requires_grad=tensor.requires_grad and tensor.is_leaf,
        )


@contextlib.contextmanager
def _fake_parameters(model: nn.Module, faker: FakeTensorMode) -> Iterator[None]:
    """Puts fake tensors in the place of parameters and buffers; tied ones stay tied."""
    put: list[tuple[dict[str, Any], str, Any]] = []
    known: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    fake = _fake(tensor, faker)
                    if isinstance(tensor, nn.Parameter) and not isinstance(fake, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    known[id(tensor)] = fake
                put.append((slots, name, tensor))
                slots[name] = known[id(tensor)]
    try:
        yield
    finally:
        for slots, name, tensor in put:
            slots[name] = tensor

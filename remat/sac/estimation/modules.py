"""Modules of a model in one training step, with their operators and memory."""

from __future__ import annotations

import contextlib
import functools
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.capture.calling import read_call
from remat.graph.capture.fakes_of_models import Faker
from remat.graph.costs import CostModel
from remat.plugins.registry import registry
from remat.running.measure import as_before, device_of, run_backward, run_forward
from remat.sac.estimation.collecting import BENCHMARK
from remat.sac.estimation.estimator import SACEstimator
from remat.sac.estimation.lifetimes import CallStats, Ints, Lifetimes
from remat.sac.estimation.stats import SACStats
from remat.sac.policies.region import context_fn
from remat.sac.run.module_calls import check_module
from remat.sac.run.operators import tensors_in
from remat.sac.run.recording import ModuleSpan
from remat.torch_compat import pytree

#: Number of operators in one timed run, and number of runs, to measure the time that a policy takes per operator.
_CHAIN, _RUNS = 100, 9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleStats:
    """Statistics of one module in a training step.

    Attributes:
        name: class of the outermost module, followed by the path of the module: ``Model.layers.0``.
        parent: position in `ModuleTree.modules` of the calling module; -1 for the outermost module.
        is_leaf: whether the module has no children. A leaf is never checkpointed.
        parameter_bytes: bytes of the parameters of the module and its submodules.
        calls: memory of each call of the module, without calls whose saved tensors backward never reads.
        stats: statistics of the module's operators, changed by `Lifetimes.as_checkpointed`; None for a leaf, or
            if the module's calls run different operators.
        why_not: reason why the module cannot be checkpointed; empty if there is none.
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
        """Qualified name of the module, as in ``model.named_modules()``; empty for the model itself."""
        return self.name.partition(".")[2]

    @property
    def operators(self) -> SACStats:
        """Statistics of the module's operators; raises an AssertionError if ``stats`` is None."""
        assert self.stats is not None, f"'{self.name}' has no statistics"
        return self.stats

    @property
    def can_run_again(self) -> bool:
        """Whether the module may be checkpointed: it is not the model itself, and has ``stats`` and no ``why_not``."""
        return bool(self.fqn) and not self.why_not and self.stats is not None

    @property
    def activation_bytes(self) -> int:
        """Bytes that the module's calls allocate and keep for backward, without storages that the calls return."""
        return sum(call.activation_bytes for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleTree:
    """Modules of a model in one training step, with the memory of the step.

    Program points are those of `StepRecorder`.

    Attributes:
        modules: the modules, in the order of their first calls; parents come before their children.
        other: array of the bytes alive at each program point, without parameters and their gradients.
        gradients: array of the bytes of the parameters' gradients alive at each program point.
        parameter_bytes: bytes of all parameters.
        forward_end: first program point of backward.
        step_ms: estimated milliseconds of a step without recomputation. Backward is assumed to take
            twice as long as forward.
        state_bytes: bytes of the random generator's state, which PyTorch keeps for each checkpointed
            call; 0 for a model on a GPU, because this state is in host memory.
        mode: name of the mode in which runtimes were estimated.
        policy_ms: milliseconds that a policy adds to each operator of forward; 0 if not measured.
    """

    modules: tuple[ModuleStats, ...]
    other: Ints
    gradients: Ints
    parameter_bytes: int
    forward_end: int
    step_ms: float
    state_bytes: int
    mode: str
    policy_ms: float = 0.0

    def __getitem__(self, fqn: str) -> ModuleStats:
        """Return the statistics of a module by name, with or without the model's class in front."""
        for module in self.modules:
            if fqn in (module.fqn, module.name):
                return module
        examples = ", ".join(m.fqn for m in self.modules[1:9])
        raise ProblemError(f"no module '{fqn}' ran in this step; some that did: {examples}")

    def ancestors(self, k: int) -> list[int]:
        """Return the positions in ``modules`` of the modules that enclose module ``k``, innermost first."""
        positions, parent = [], self.modules[k].parent
        while parent >= 0:
            positions.append(parent)
            parent = self.modules[parent].parent
        return positions

    def memory(self, world_size: int = 1) -> Ints:
        """Return one rank's bytes alive at each program point; ``world_size`` ranks shard parameters and gradients."""
        sharded = self.parameter_bytes + self.gradients
        return self.other + -(-sharded // world_size)

    def peak_bytes(self, world_size: int = 1) -> int:
        """Return the step's peak in bytes on one of ``world_size`` ranks; see `memory`."""
        return int(self.memory(world_size).max(initial=0))


def estimate(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "operator-level-cost-model",
    cost: str | CostModel | None = None,
    fake: bool | None = None,
) -> ModuleTree:
    """Estimate, for each module of a model, the memory that checkpointing the module frees, and the recompute time.

    Args:
        model: the model in train mode.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        mode: ``"operator-level-cost-model"`` takes runtimes from a cost model,
            ``"operator-level-benchmark"`` measures them; see `SACEstimator`.
        cost: name or instance of a cost model to use instead of the mode's own: ``"roofline:h100"``.
        fake: whether the step runs on fake tensors, which need neither memory nor a GPU. If a model runs other
            operators on real tensors than on fake ones, the model may raise a PolicyError when it runs under its plan.
            None: use fake tensors unless all parameters, buffers and inputs are on the CPU.

    Returns:
        The model's modules with their operators and memory, as `remat.sac.plan` accepts them.

    Raises:
        ProblemError: ``mode`` or ``cost`` is unknown, ``model`` is not a module, or a module cannot be
            estimated.
        CaptureError: ``args`` is not a tuple, ``kwargs`` is not a dict, or no output requires a gradient.
    """
    costs = None if cost is None else registry().cost_model(cost)
    check_module(model)
    args, named = read_call(args, kwargs)
    tensors = given_tensors(model, args, named)
    if fake is None:
        fake = not _on_the_cpu(tensors)
    on_host = all(t.device.type in ("cpu", "meta") for t in tensors)
    state_bytes = torch.get_rng_state().nbytes if on_host else 0
    estimator = SACEstimator()
    with contextlib.ExitStack() as stack:
        if fake:
            fake_mode = torch_compat.FakeTensorMode(allow_non_fake_inputs=True)
            # PyTorch's choice of some operators, such as those of attention, depends on the device. So
            # tensors on the meta device become fake tensors on the CPU.
            faker = Faker(fake_mode, None)
            args, named = pytree.tree_map(faker, (args, named))
            stack.enter_context(_fake_parameters(model, faker))
            stack.enter_context(fake_mode)
        lifetimes = record_step(model, args, named, estimator(mode, costs))
        timed = mode == BENCHMARK and cost is None and not fake and _on_the_cpu(tensors)
        tree = build_tree(model, estimator, lifetimes, state_bytes)
        return replace(tree, policy_ms=policy_ms()) if timed else tree


@contextlib.contextmanager
def _fake_parameters(model: nn.Module, faker: Faker) -> Iterator[None]:
    """Replace a model's parameters and buffers by fake tensors within the ``with`` block."""
    # The model itself is changed, because some models cannot be copied.
    originals = [
        (slots, name, tensor)
        for module in model.modules()
        for slots in (torch_compat.parameters_of(module), torch_compat.buffers_of(module))
        for name, tensor in slots.items()
        if tensor is not None
    ]
    try:
        for slots, name, tensor in originals:
            slots[name] = faker(tensor)
        yield
    finally:
        for slots, name, tensor in originals:
            slots[name] = tensor


def record_step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], estimator: SACEstimator
) -> Lifetimes:
    """Run one step, record its operators in ``estimator``, and return the lifetimes of its storages.

    Raises:
        CaptureError: no output requires a gradient.
    """
    tensors = given_tensors(model, args, kwargs)
    restored, device = tensors, device_of(tensors)
    if torch_compat.active_fake_mode() is not None:
        # Fake tensors have no values to restore, and draw no random numbers.
        restored, device = [t for t in tensors if t.requires_grad], torch.device("cpu")
    with as_before(restored, device):
        with estimator.recording(tensors, model) as recorder:
            result = run_forward(loss_only(model), args, kwargs)
        forward_end = recorder.now
        with recorder:
            run_backward(result)
        return Lifetimes(recorder, model, forward_end)


def given_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that exist before a step: parameters, buffers and inputs."""
    return [*model.parameters(), *model.buffers(), *tensors_in((tuple(args), kwargs))]


def loss_only(model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model, so that backward starts from the loss if the model's output contains a loss.

    If the output has a ``loss`` that requires a gradient, the wrapper returns a pair: the loss, and all tensors of the
    output, detached. If the output has no ``loss`` that requires a gradient, the wrapper returns the model's output
    unchanged.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return out
        # All tensors are returned, detached, because a user's step keeps the whole output alive during backward.
        return loss, [t.detach() for t in tensors_in(out)]

    return step


def _on_the_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors are on the CPU."""
    return all(t.device.type == "cpu" for t in tensors)


@functools.cache
def policy_ms() -> float:
    """Return the milliseconds that a policy adds to an operator in forward, measured on this CPU."""
    sin, seconds = torch.ones(1).sin, []
    for context in (contextlib.nullcontext(), context_fn([])()[0]):
        with context:
            # The fastest runs are compared, because interruptions only add time.
            seconds.append(min(timeit.repeat(sin, number=_CHAIN, repeat=_RUNS)))
    # Noise may make the difference negative.
    return max(0.0, 1e3 * (seconds[1] - seconds[0]) / _CHAIN)


def build_tree(
    model: nn.Module, estimator: SACEstimator, lifetimes: Lifetimes, state_bytes: int
) -> ModuleTree:
    """Build a `ModuleTree` from the operators and the storages of one recorded step."""
    spans = lifetimes.recorder.spans
    order: dict[str, list[ModuleSpan]] = {}
    for span in spans:
        order.setdefault(span.name, []).append(span)
    places = {name: k for k, name in enumerate(order)}
    parameters = {
        name: sum(p.untyped_storage().nbytes() for p in m.parameters())
        for name, m in model.named_modules()
    }
    modules = []
    for name, calls in order.items():
        stats = estimator.sac_mod_stats.get(name)
        with_backward = [s for s in calls if s.back_begin >= 0]
        if stats is not None and with_backward:
            # All calls of a module store the same set of results, so the statistics are those of the first call.
            stats = lifetimes.as_checkpointed(with_backward[0], stats)
        parent = calls[0].parent
        modules.append(
            ModuleStats(
                name=name,
                parent=places[spans[parent].name] if parent >= 0 else -1,
                is_leaf=calls[0].is_leaf,
                parameter_bytes=parameters.get(name.partition(".")[2], 0),
                calls=tuple(lifetimes.call_stats(s) for s in with_backward),
                stats=stats,
                why_not=_why_not(name, calls, estimator, lifetimes),
            )
        )
    roots = [s.stats for s in modules if s.parent < 0 and s.stats is not None]
    return ModuleTree(
        modules=tuple(modules),
        other=lifetimes.total - lifetimes.alive(lifetimes.resident | lifetimes.gradients),
        gradients=lifetimes.alive(lifetimes.gradients),
        parameter_bytes=int(sum(lifetimes.nbytes[k] for k in lifetimes.resident)),
        forward_end=lifetimes.forward_end,
        # Backward is taken to cost twice as much as forward.
        step_ms=3 * sum(sum(s.runtimes) for s in roots),
        state_bytes=state_bytes,
        mode=estimator.mode,
    )


def _why_not(
    name: str, calls: Sequence[ModuleSpan], estimator: SACEstimator, lifetimes: Lifetimes
) -> str:
    """Return the reason why a module cannot be checkpointed; empty if it can be."""
    if calls[0].is_leaf:
        return "it has no children"
    if name in estimator.sac_mod_unsteady:
        return estimator.sac_mod_unsteady[name]
    if any(s.failed for s in calls):
        return "one of its calls ends in an exception"
    if any(s.back_begin < 0 for s in calls):
        return "backward needs nothing that is saved in one of its calls"
    if any(
        s.begin <= lifetimes.born[k] and lifetimes.recorder.last_write.get(k, -1) >= s.end
        for s in calls
        for k in s.outputs
    ):
        return "what it returns is written to after that, and may not be stored then"
    return ""

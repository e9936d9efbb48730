"""The modules of a model in one step: their operators, and their share of the memory."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.calling import read_call, why_no_instance
from remat.graph.costs import CostModel
from remat.running.measure import run_backward, run_forward
from remat.sac.estimation.calls import CallStats, as_checkpointed, call_stats
from remat.sac.estimation.collecting import BENCHMARK
from remat.sac.estimation.estimator import SACEstimator
from remat.sac.estimation.reruns import policy_ms, time_reruns
from remat.sac.estimation.stats import SACStats
from remat.sac.run.fakes import fake_of, fake_parameters, left_as_found
from remat.sac.run.lifetimes import Ints, Lifetimes, given_tensors, loss_only
from remat.sac.run.recording import ModuleSpan
from remat.torch_compat import pytree


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
        overhead_ms: milliseconds that running it again takes beyond its operators: policies, and what
            PyTorch does about them. 0 where it was not measured.
    """

    name: str
    parent: int
    is_leaf: bool
    parameter_bytes: int
    calls: tuple[CallStats, ...]
    stats: SACStats | None = field(repr=False)
    why_not: str = ""
    overhead_ms: float = 0.0

    @property
    def fqn(self) -> str:
        """The name as in ``model.named_modules()``; empty for the model itself."""
        return self.name.partition(".")[2]

    @property
    def operators(self) -> SACStats:
        """Its operators; only where it can run again."""
        assert self.stats is not None, f"'{self.name}' has no statistics"
        return self.stats

    @property
    def can_run_again(self) -> bool:
        """Whether it may be checkpointed: not the model itself, no leaf, and nothing speaks against it."""
        return bool(self.fqn) and not self.why_not and self.stats is not None

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
        state_bytes: of the generator's state that PyTorch keeps for each checkpointed call; 0 on a GPU,
            where it is in the host's memory.
        mode: how runtimes were found.
        cost: the cost model.
        policy_ms: milliseconds that a policy takes for each operator of forward; 0 where it was not measured.
    """

    modules: tuple[ModuleStats, ...]
    post_order: tuple[int, ...]
    other: Ints
    gradients: Ints
    parameter_bytes: int
    forward_end: int
    step_ms: float
    state_bytes: int
    mode: str
    cost: str
    policy_ms: float = 0.0

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

    def memory(self, world_size: int = 1) -> Ints:
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
    """Estimates a model from one step, forward and backward.

    Args:
        model: in train mode.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        mode: how runtimes are found; see `SACEstimator`. In ``"operator-level-benchmark"``, modules on
            real CPU tensors are timed while they run again, operator by operator (`remat.sac.estimation.reruns`).
        cost: another cost model for the mode.
        fake: whether to run on fake tensors, which takes neither memory nor a GPU. Some models run
            other operators then (see `SACEstimator`), and a plan made from those is refused when it
            is applied. None: fake, unless all parameters and inputs lie on the CPU.

    Raises:
        ProblemError: no such mode, or no operator of a module can be estimated.
        CaptureError: the arguments are no tuple and dict, or no output requires a gradient.
    """
    if not isinstance(model, nn.Module):
        raise ProblemError(
            why_no_instance(model)
            or f"model is a {type(model).__name__}; expected a torch.nn.Module: what is checkpointed are "
            "its modules"
        )
    args, named = read_call(args, kwargs)
    given = given_tensors(model, args, named)
    if fake is None:
        fake = not _on_the_cpu(given)
    on_host = all(t.device.type in ("cpu", "meta") for t in given)
    state_bytes = torch.get_rng_state().nbytes if on_host else 0
    estimator = SACEstimator()
    with contextlib.ExitStack() as stack:
        if fake:
            faker = torch_compat.FakeTensorMode(allow_non_fake_inputs=True)
            args, named = pytree.tree_map_only(
                torch.Tensor, lambda t: fake_of(t, faker), (args, named)
            )
            stack.enter_context(fake_parameters(model, faker))
            stack.enter_context(faker)
        lifetimes = record_step(model, args, named, estimator(mode, cost, fake=fake))
        timed = mode == BENCHMARK and cost is None and not fake and _on_the_cpu(given)
        tree = build_tree(model, estimator, lifetimes, state_bytes)
        return with_reruns(tree, model, args, named) if timed else tree


def record_step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], estimator: SACEstimator
) -> Lifetimes:
    """Runs forward and backward of one step; the estimator takes what its modules run.

    A loss that is called ``loss`` is what backward starts from, and everything else that forward
    returned stays alive; without one, it starts from all outputs (see `loss_only`).

    Raises:
        CaptureError: no output requires a gradient.
    """
    given = given_tensors(model, args, kwargs)
    with left_as_found(given):
        recorder = estimator.record(given)
        with recorder.forward(model):
            result = run_forward(loss_only(model), args, kwargs)
        forward_end = recorder.now
        with recorder:
            run_backward(result)
        return Lifetimes.of(recorder, model, forward_end)


def _on_the_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    return all(t.device.type == "cpu" for t in tensors)


def build_tree(
    model: nn.Module, estimator: SACEstimator, lifetimes: Lifetimes, state_bytes: int
) -> ModuleTree:
    """Joins what the estimator knows of operators with what is known of memory.

    Args:
        model: the model.
        estimator: its operators.
        lifetimes: a step of it.
        state_bytes: see `ModuleTree`.
    """
    spans = lifetimes.spans
    order: dict[str, list[ModuleSpan]] = {}
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
            stats = as_checkpointed(lifetimes, with_backward[0], stats)
        parent = calls[0].parent
        modules.append(
            ModuleStats(
                name=name,
                parent=places[spans[parent].name] if parent >= 0 else -1,
                is_leaf=calls[0].is_leaf,
                parameter_bytes=parameters.get(name.partition(".")[2], 0),
                calls=tuple(call_stats(lifetimes, s) for s in with_backward),
                stats=stats,
                why_not=_why_not(name, calls, estimator, lifetimes),
            )
        )
    ended = sorted(order, key=lambda name: (order[name][0].end, -places[name]))
    roots = [s.stats for s in modules if s.parent < 0 and s.stats is not None]
    return ModuleTree(
        modules=tuple(modules),
        post_order=tuple(places[name] for name in ended),
        other=lifetimes.total - lifetimes.alive(lifetimes.resident | lifetimes.gradients),
        gradients=lifetimes.alive(lifetimes.gradients),
        parameter_bytes=int(sum(lifetimes.nbytes[k] for k in lifetimes.resident)),
        forward_end=lifetimes.forward_end,
        step_ms=3 * sum(sum(s.runtimes) for s in roots),
        state_bytes=state_bytes,
        mode=estimator.mode,
        cost=str(estimator.cost),
    )


def with_reruns(
    tree: ModuleTree, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ModuleTree:
    """The tree with what running modules again really takes, on the CPU.

    Modules that lie in one another are checkpointed in steps of their own. Those with the same
    operators get the same times, the median of theirs: so they stay equal. Where a module fails when it
    runs again, those of its steps keep the times of operators one by one.
    """
    levels: dict[int, list[str]] = {0: []}
    can = [m.can_run_again for m in tree.modules]
    for k, module in enumerate(tree.modules):
        if can[k]:
            levels.setdefault(sum(can[a] for a in tree.ancestors(k)), []).append(module.fqn)
    runs = [time_reruns(model, args, kwargs, names) for names in levels.values()]
    found = {name: rerun for run in runs if run is not None for name, rerun in run.modules.items()}
    alike: dict[Any, list[tuple[list[float], float]]] = {}
    for module in tree.modules:
        if module.fqn in found:
            rerun, stats = found[module.fqn], module.operators
            times = rerun.runtimes(stats.func_names, stats.runtimes)
            alike.setdefault(_kind(stats), []).append((times, rerun.overhead_ms))
    forward_ms = [run.forward_ms for run in runs if run is not None]
    return replace(
        tree,
        modules=tuple(_as_alike(m, alike) if m.fqn in found else m for m in tree.modules),
        step_ms=3 * statistics.median(forward_ms) if forward_ms else tree.step_ms,
        policy_ms=policy_ms(),
    )


def _kind(stats: SACStats) -> tuple[Any, ...]:
    return tuple(stats.func_names), tuple(stats.memory)


def _as_alike(
    module: ModuleStats, alike: Mapping[Any, Sequence[tuple[list[float], float]]]
) -> ModuleStats:
    times, overheads = zip(*alike[_kind(module.operators)], strict=True)
    typical = [statistics.median(each) for each in zip(*times, strict=True)]
    return replace(
        module,
        stats=replace(module.operators, runtimes=typical),
        overhead_ms=statistics.median(overheads),
    )


def _why_not(
    name: str, calls: Sequence[ModuleSpan], estimator: SACEstimator, lifetimes: Lifetimes
) -> str:
    if calls[0].is_leaf:
        return "it has no children"
    if name in estimator.sac_mod_unsteady:
        return estimator.sac_mod_unsteady[name]
    if any(s.failed for s in calls):
        return "one of its calls ends in an exception"
    if any(s.back_begin < 0 for s in calls):
        return "backward needs nothing that is saved in one of its calls"
    if any(
        s.begin <= lifetimes.born[k] and lifetimes.written.get(k, -1) >= s.end
        for s in calls
        for k in s.outputs
    ):
        return "what it returns is written to after that, and may not be stored then"
    return ""

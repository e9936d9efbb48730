"""The Dynamo backend ``"remat"``, and the function `remat.backend`, which builds a backend with options.

A backend partitions each graph of Dynamo into forward and backward under a budget. The backend compiles the forward and
the backward graph with Inductor, or runs them uncompiled.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from torch import fx

from remat import torch_compat
from remat.arguments import BUDGET, COST, SOLVER, passes_on
from remat.errors import BudgetWarning, ProblemError, RematError, did_you_mean, warn
from remat.graph.capture.errors import name_plain_failure
from remat.graph.capture.regions import Modules, calls_regions
from remat.graph.capture.step import LOWERINGS
from remat.graph.capture.tangents import layouts_of_tangents
from remat.graph.joint import copy_module
from remat.integrations.alone import joint_of_whole, plan_whole
from remat.integrations.budget_loop import compile_within_budget
from remat.integrations.compile_progress import CompileProgress
from remat.integrations.partitioner import Partitioner, PartitionerOptions
from remat.integrations.stages import Arrived, Compiled, Planned, Run
from remat.integrations.step_sizes import at_declared_sizes
from remat.integrations.step_wrapper import wrap_step
from remat.integrations.traced_graph import joint_of, name_of
from remat.options import CostOption, SolverOption
from remat.planning.planner import plan_graph
from remat.units import AnyBudget

_LOCK = threading.Lock()
#: Dict from the mode and the ids of the options of ``torch.compile(backend="remat", options=…)`` to their backend. Dynamo
#: passes the same dict, with the same values, for each graph of a model. An entry lives as long as a step that its backend
#: compiled.
_BACKENDS: weakref.WeakValueDictionary[Hashable, Backend] = weakref.WeakValueDictionary()

#: Names of the options that `backend` passes on to `Partitioner`, beside those that it has itself.
_KEYWORDS = (*PartitionerOptions.__annotations__, "exact_branches", "check")
#: Names of remat's options; `Backend` passes all others to Inductor.
OPTIONS = ("budget", "solver", "cost", "time_limit", "lower", *_KEYWORDS)
#: Inductor's setting for rounding every 16-bit result. If the user gives it, remat does not turn it on by itself.
_ROUNDS = "emulate_precision_casts"
#: Inductor's setting for reusing a buffer for a later result of the same size; remat switches the reuse off. Inductor
#: decides on reuse by an estimate of the peak that ignores workspaces (internal buffers) of attention and convolutions.
#: If Inductor does not reuse buffers, a buffer is freed after its last reader.
_KEPT_MEMORY = "allow_buffer_reuse"


class Backend:
    """A backend of ``torch.compile`` with checked options; `remat.backend` creates one.

    Args:
        options: remat's and Inductor's options by name.
        mode: a mode of Inductor, such as ``"max-autotune"``.

    Raises:
        RematError: an option is unknown or invalid.
    """

    __name__ = "remat"

    def __init__(self, options: Mapping[str, Any], mode: str | None = None) -> None:
        given = dict(options)
        ours = {k: given.pop(k) for k in OPTIONS if k in given}
        lower = ours.setdefault("lower", "inductor")
        if lower not in LOWERINGS:
            raise ProblemError(
                f"option 'lower' is {lower!r}; expected one of {', '.join(map(repr, LOWERINGS))}"
            )
        _check_inductor(given)
        if _ROUNDS in {str(k).replace("-", "_") for k in given}:
            ours["exact_branches"] = False
        self._partition = Partitioner(**ours)
        if lower == "eager":
            if given or mode is not None:
                names = ", ".join(repr(k) for k in given) or f"mode={mode!r}"
                raise ProblemError(
                    f"lower='eager' does not use Inductor, but {names} is for it; known options of remat: "
                    f"{', '.join(OPTIONS)}"
                )
            self._patches: dict[str, Any] = {}
        else:
            self._patches = _inductor_options(self._partition, given, mode)
        # The options are kept alive, so that nothing else gets an id that is a part of their key in `_BACKENDS`.
        self._options = options, [*options.values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this backend, so that a deep copy of a compiled model uses the same backend."""
        return self

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **more: Any
    ) -> Callable[..., Any]:
        """Plan and compile one graph; Dynamo calls this method.

        Args:
            gm: the graph from Dynamo.
            example_inputs: example inputs of the graph.
            more: ``options`` and ``mode`` of ``torch.compile``, which are refused, because
                `remat.backend` takes them.

        Returns:
            The compiled function.

        Raises:
            RematError: ``more`` is not empty, or the graph cannot be planned. The error is also a
                ``BackendCompilerFailed``, so that Dynamo raises it unchanged.
        """
        try:
            if more:
                raise ProblemError(
                    f"torch.compile was given {', '.join(more)} beside remat.backend(…); give remat.backend all "
                    "of them: remat.backend(budget=…, mode=…)"
                )
            compile_once = partial(self._compile, gm, example_inputs)
            run, planned = compile_once()
            if planned is None:
                return run
            return planned.in_turn(lambda: compile_once()[0], run)
        except RematError as error:
            raise _for_dynamo(error) from None

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[Run, Planned | None]:
        """Plan and compile one graph; return the compiled function, and its `Planned` stage (None without a plan)."""
        partition, lower = self._partition, self._partition.lower
        progress = CompileProgress(name_of(gm))
        arrived = Arrived.of(partition, gm, example_inputs, progress.stage)
        with (
            progress,
            at_declared_sizes(example_inputs, in_bytes=partition.in_bytes),
            torch_compat.functorch_config.patch(
                layouts_of_tangents(gm.graph) | _checkpoints_of_step(arrived, gm)
            ),
        ):
            try:
                if lower == "eager":
                    compiled = _compile_eager(arrived, gm, example_inputs)
                else:
                    compiled = compile_within_budget(
                        arrived, gm, example_inputs, dict(self._patches)
                    )
            except Exception as error:
                name_plain_failure(error, gm, example_inputs, lower)
                raise
            planned = compiled.planned
            # `remat.plans` promises the plan's modules as long as the compiled step lives. An attribute of the
            # innermost function keeps the modules alive, because Dynamo drops wrappers.
            with contextlib.suppress(AttributeError):
                torch_compat.innermost_fn(compiled.run).partitioned = self, planned  # type: ignore[attr-defined]
            if planned is None:
                if arrived.runs_backward:
                    _warn_of_traced_backward(arrived, gm)
                return compiled.run, None
            planned.check_host()
            look = planned.finish(_traced_inputs(gm, example_inputs))
            progress.finish(planned.plan)
            count = planned.count_runs(gm, example_inputs, self)
            by_inductor = lower == "inductor"
            run = wrap_step(
                compiled.run, planned.plan, by_inductor=by_inductor, count=count, look=look
            )
            return run, planned


def _checkpoints_of_step(arrived: Arrived, gm: fx.GraphModule) -> dict[str, bool]:
    """If the step is one graph, return settings by which AOTAutograd leaves checkpoint tags to remat's plan."""
    # PyTorch's own pass refuses random operators in a checkpointed region, and fixes which values are recomputed.
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    is_planned = arrived.runs_backward and not calls_regions(gm)
    return {name: False} if is_planned and hasattr(torch_compat.functorch_config, name) else {}


def _traced_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Return a graph's inputs with symbolic sizes; Dynamo gives jagged tensors to a backend without such sizes."""
    places = gm.graph.find_nodes(op="placeholder")
    return [
        node.meta.get("example_value", value)
        for node, value in zip(places, example_inputs, strict=True)
    ]


def compile_step(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of ``torch.compile(model, backend="remat")``; Dynamo calls this function.

    Args:
        gm: the graph from Dynamo.
        example_inputs: example inputs of the graph.
        options: dict of options by name. Options that are no argument of `remat.backend` are passed
            to Inductor.
        mode: a mode of Inductor.

    Returns:
        The compiled function.

    Raises:
        RematError: an option is invalid, or the graph cannot be planned.
    """
    try:
        if options is not None and not isinstance(options, Mapping):
            raise ProblemError(
                f"options is {options!r}; expected a dict of options by name, such as "
                'torch.compile(model, backend="remat", options={"budget": "40GiB"})'
            )
        given = {} if options is None else options
        # The user may change the dict between two calls of `torch.compile`.
        key = id(options), repr(mode), *((name, id(value)) for name, value in given.items())
        with _LOCK:
            cached = None if options is None else _BACKENDS.get(key)
            if cached is None:
                cached = _BACKENDS[key] = Backend(given, mode)
    except RematError as error:
        raise _for_dynamo(error) from None
    return cached(gm, example_inputs)


@passes_on(_KEYWORDS, Partitioner.__init__, others=True)
def backend(
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    lower: str = "inductor",
    mode: str | None = None,
    **options: object,
) -> Backend:
    """Build a backend for ``torch.compile(model, backend=remat.backend(budget="40GiB"))``.

    Args:
        budget: a limit on the peak or on the saved bytes, such as ``"40GiB"``; see
            `remat.options.PlanOptions` for all forms. If ``plan`` is given too, graphs
            without a saved plan are planned under this budget.
        solver: name of the solver that decides, or a `remat.Solver`; ``"auto"`` takes the best plan
            of several solvers.
        cost: the cost model, such as ``"roofline:a100"``.
        time_limit: seconds for each call of the solver; None: no time limit.
        lower: ``"inductor"`` to compile the forward and backward graphs with Inductor; ``"eager"``
            to run them uncompiled.
        mode: a mode of Inductor, such as ``"max-autotune"``.
        options: options of `remat.options.PlanOptions`, except ``count_outputs`` and ``isolation``;
            options of `remat.integrations.partition_options.PartitionOptions`; and options of
            Inductor, as in `torch.compile`.

    Raises:
        RematError: an option is invalid. `backend` raises the error, not the first compilation.
    """
    planned = {"budget": budget, "solver": solver, "cost": cost, "time_limit": time_limit}
    return Backend(planned | {"lower": lower} | options, mode)


def _for_dynamo(error: RematError) -> Exception:
    """Convert an error so that Dynamo raises it unchanged, with its own class and message."""
    # Dynamo raises a `BackendCompilerFailed` unchanged. It wraps every other exception of a backend, and adds
    # that PyTorch may have a bug.
    own = type(error)

    def message(self: Any) -> str:
        return f"backend='remat' raised:\n{own.__name__}: {error}"

    kind: Any = type(
        own.__name__,
        (torch_compat.BackendCompilerFailed, own),
        {"__str__": message, "__module__": own.__module__},
    )
    raised = kind.__new__(kind)
    vars(raised).update(vars(error))
    torch_compat.BackendCompilerFailed.__init__(raised, Backend, error, None)
    return raised.with_traceback(error.__traceback__)  # type: ignore[no-any-return]


def _check_inductor(options: Mapping[str, Any]) -> None:
    """Check that the options that are not remat's are options of Inductor, and that their values are valid."""
    if not options:
        return
    theirs = torch_compat.list_options()
    for name, value in options.items():
        written = str(name).replace("-", "_")
        if not isinstance(name, str) or written not in theirs:
            # remat's names are suggested first, since Inductor has hundreds of options.
            meant = did_you_mean(written, OPTIONS) or did_you_mean(written, theirs)
            raise ProblemError(
                f"option {name!r} is known to neither remat ({', '.join(OPTIONS)}) nor Inductor "
                f"(torch._inductor.list_options() lists its options){meant}"
            )
        # Inductor takes any value that is true for True, such as the text "False".
        kind = torch_compat.inductor_config.get_type(written)  # type: ignore[attr-defined]
        if kind is bool and not isinstance(value, bool):
            raise ProblemError(f"option {name!r} of Inductor is {value!r}; expected True or False")


def _compile_eager(arrived: Arrived, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Partition a graph from Dynamo, and return a function that runs its forward and backward graph uncompiled."""
    planned: list[Planned] = []
    plan = partial(plan_graph, in_place=True)

    def partition(module: fx.GraphModule, inputs: Sequence[Any], **convention: Any) -> Modules:
        joint = joint_of(module, "eager", **convention)
        own, modules = arrived.partition(joint, inputs, plan)
        planned.extend([] if own is None else [own])
        return modules

    def alone(module: fx.GraphModule, given: Sequence[Any]) -> Any:
        joint = joint_of_whole(arrived, module, name_of(gm))
        if joint is not None:
            own, module = plan_whole(arrived, joint, given, plan)
            planned.extend([] if own is None else [own])
        return boxed(module)

    compiled = torch_compat.aot_autograd(
        fw_compiler=lambda module, _: boxed(module),
        inference_compiler=alone,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    run = compiled(gm, example_inputs)
    return Compiled(planned=planned[0] if planned else None, run=run)


def _warn_of_traced_backward(arrived: Arrived, gm: fx.GraphModule) -> None:
    """Warn that a graph has no plan, because it computes gradients itself and calls nested compile regions."""
    warn(
        f"'{torch_compat.traced_frame()[0] or name_of(gm)}' runs without a plan, and its budget {arrived.options.request.budget.label} is not "
        "held: it computes gradients itself, and calls torch.compiler.nested_compile_region. Compile it without such "
        "regions",
        BudgetWarning,
    )


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph uncompiled and frees each argument after its last use.

    The returned function takes one list of arguments and empties the list. With ordinary arguments,
    the caller would keep every saved activation alive until backward ends.
    """
    graph = copy_module(module).graph
    graph.set_codegen(torch_compat.BoxedCodeGen())
    boxed = fx.GraphModule(module, graph)

    def run(arguments: list[Any]) -> Any:
        return boxed.forward(arguments)

    torch_compat.mark_boxed(run)
    return run


def _inductor_options(
    partition: Partitioner, options: Mapping[str, Any], mode: str | None
) -> dict[str, Any]:
    """Return the settings with which Inductor compiles a step: those of remat, of ``mode``, and of the user."""
    patches: dict[str, Any] = {_KEPT_MEMORY: False}
    modes = torch_compat.list_mode_options()
    if mode is not None and mode not in [*modes]:
        raise ProblemError(f"mode is {mode!r}; expected one of {', '.join(map(repr, modes))}")
    # Later settings override earlier ones: those of the mode override remat's, and those of the user override
    # both.
    patches.update(modes[mode] if mode else {})
    patches.update({k.replace("-", "_"): v for k, v in options.items()})
    if not partition.cacheable:  # a cached graph could have been compiled with another hook
        patches["fx_graph_cache"] = patches["fx_graph_remote_cache"] = False
    return patches

"""All private names of current PyTorch versions that remat uses, each imported on first use.

PyTorch moves and renames private names without notice. A new PyTorch version is supported by
changing this file. A name that a version lacks raises an error only when that name is used, so
unknown versions run as far as they can.

The imports under ``TYPE_CHECKING`` never run. Type checkers read these imports, and `look_up` reads from them where
PyTorch defines each name. Small functions at the end of this file read or write private attributes of PyTorch's
objects.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any

from remat.errors import TorchVersionError, levels_to_user
from remat.lazy import names_for_types

#: The minor versions of PyTorch on which the whole test suite passes, oldest first.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")


class TorchVersionWarning(UserWarning):
    """Warning that the installed PyTorch is newer than the versions that remat is tested with."""


if TYPE_CHECKING:
    import torch
    from torch import _TorchCompileInductorWrapper as CompileWithInductor
    from torch import fx
    from torch._C import DisableTorchFunction
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C import _DisableAutocast as DisableAutocast
    from torch._C import _get_dispatch_mode as get_dispatch_mode
    from torch._C import _get_privateuse1_backend_name as get_privateuse1_backend_name
    from torch._C import _jit_get_schemas_for_operator as jit_get_schemas_for_operator
    from torch._C import _TorchDispatchModeKey as TorchDispatchModeKey
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
    from torch._C._autograd import _profiler_enabled as is_profiling
    from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensor_hooks
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import explain, innermost_fn
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
    from torch._dynamo.pgo import get_code_state
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._functorch._activation_checkpointing.graph_info_provider import GraphInfoProvider
    from torch._functorch._activation_checkpointing.knapsack_evaluator import KnapsackEvaluator
    from torch._functorch._aot_autograd import descriptors
    from torch._functorch._aot_autograd.descriptors import (
        SavedForBackwardsAOTOutput,
        SavedForBackwardsNoVcCheckAOTOutput,
    )
    from torch._functorch._aot_autograd.utils import (
        get_default_generator,
        make_boxed_func,
        supports_graphsafe_rng,
    )
    from torch._functorch.eager_transforms import _autograd_grad as functorch_grad
    from torch._functorch.partitioners import _size_of as size_of
    from torch._functorch.partitioners import (
        default_partition,
        estimate_runtime,
        min_cut_rematerialization_partition,
    )
    from torch._guards import CompileContext, TracingContext, active_fake_mode
    from torch._higher_order_ops.auto_functionalize import get_mutable_args
    from torch._higher_order_ops.effects import _get_effect as get_effect
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options, list_options
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen.cpp import CppKernel, TilingSelect
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import (
        CustomKnapsackSolver,
        CustomPartitionerFn,
        CustomSchedulerPass,
    )
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.inductor_prims import force_stride_order
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.scheduler import ExternKernelSchedulerNode
    from torch._inductor.virtualized import V as INDUCTOR
    from torch._library.custom_ops import OPDEFS, CustomOpDef
    from torch._library.utils import is_impure
    from torch._ops import (
        HigherOrderOperator,
        OperatorBase,
        OpOverload,
        OpOverloadPacket,
    )
    from torch._ops import _higher_order_ops as higher_order_ops
    from torch._prims import rng_prims
    from torch._prims_common import is_contiguous_or_false
    from torch._subclasses.fake_impls import fast_detach
    from torch._subclasses.fake_tensor import (
        FakeTensor,
        FakeTensorMode,
        is_fake,
    )
    from torch.distributed.distributed_c10d import _get_default_store as get_default_store
    from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
    from torch.fx.experimental._backward_state import BackwardState
    from torch.fx.experimental.symbolic_shapes import optimization_hint
    from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
    from torch.fx.traceback import MEMORY_BUDGET_ANNOTATION_KEY as REGION_BUDGET
    from torch.utils import _pytree as pytree
    from torch.utils._dtype_abbrs import dtype_abbrs
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        is_traceable_wrapper_subclass,
        is_traceable_wrapper_subclass_type,
    )
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._sympy import functions as sympy_functions
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy
    from torch.utils._traceback import CapturedTraceback
    from torch.xpu import _is_compiled as xpu_is_compiled

#: Dict from a private name to its import paths in other PyTorch versions, as ``module:name``, newest version first. A
#: comment beside each path names the versions that have it. A path in `remat.torch_older` is a substitute for
#: a name that these versions lack.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "CustomSchedulerPass": ("torch._inductor.custom_graph_pass:CustomGraphPass",),  # 2.11, 2.12
    "REGION_BUDGET": ("remat.torch_older:REGION_BUDGET_KEY",),  # 2.11, 2.12
    "get_default_generator": ("remat.torch_older:default_cuda_generator",),  # 2.11, 2.12
    "optimization_hint": ("remat.torch_older:size_within_bounds",),  # 2.11
    "supports_graphsafe_rng": ("remat.torch_older:is_on_cuda",),  # 2.11, 2.12
}

#: Inductor's settings for passes of its scheduler that run before fusion, and after it.
PRE_FUSION_PASS = "_pre_fusion_custom_pass"
POST_FUSION_PASS = "_post_fusion_custom_pass"


#: Dict from each private name to the import paths that it may have in PyTorch, as ``module:name``. The first path is
#: the one imported under ``TYPE_CHECKING``.
HOMES = {
    name: (home, *ELSEWHERE.get(name, ()))
    for name, home in names_for_types(__file__).items()
    if home != "torch:fx"
}

#: Dict from a namespace of operators to the modules of PyTorch whose import registers the operators of that namespace.
REGISTERED_BY = {
    "prims": ("torch._prims", "torch._inductor.inductor_prims"),
    "higher_order": (
        "torch._higher_order_ops",
        "torch._higher_order_ops.triton_kernel_wrap",
        "torch._prims.rng_prims",
    ),
}

if not TYPE_CHECKING:  # for mypy, only the names imported above exist

    def __getattr__(name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = look_up(HOMES[name])
        return value


def look_up(homes: tuple[str, ...]) -> Any:
    """Import a private name of PyTorch from the first import path that exists in this version.

    Args:
        homes: possible import paths of the name, as ``module:name``.

    Raises:
        TorchVersionError: none of the paths exists in this version.
    """
    for home in homes:
        module, _, name = home.partition(":")
        try:
            # With ``fromlist``, `__import__` returns the submodule instead of the top-level package.
            return getattr(__import__(module, fromlist=[name]), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("torch"):
                raise  # a dependency of PyTorch is missing, which another version would not change
        except AttributeError:
            pass
    import torch

    expected = " or ".join(home.replace(":", ".") for home in homes)
    raise TorchVersionError(
        f"PyTorch {torch.__version__} has no {expected}, which remat needs here: install a PyTorch "
        f"that remat is tested with ({', '.join(TESTED)}), or a newer remat"
    )


def is_tested() -> bool:
    """Return whether the installed minor version of PyTorch is one that remat is tested with."""
    import torch

    return _minor(torch.__version__) in map(_minor, TESTED)


@functools.cache
def check_version() -> None:
    """Warn once per process if the installed PyTorch is newer than all tested versions, and refuse an older one.

    Capturing, partitioning and compiling call this function; importing remat does not.

    Raises:
        TorchVersionError: the installed PyTorch is older than all tested versions.
    """
    import torch

    if _minor(torch.__version__) < _minor(TESTED[0]):
        raise TorchVersionError(
            f"remat needs PyTorch {TESTED[0]} or newer; this is {torch.__version__}: install a newer PyTorch"
        )
    if _minor(torch.__version__) > _minor(TESTED[-1]):
        warnings.warn(
            f"remat is tested with PyTorch {', '.join(TESTED)}; this is {torch.__version__}. What it "
            "uses of PyTorch's private parts may have changed: look for a newer remat, and compare "
            "the gradients of a step with those of eager PyTorch. To silence this: "
            "warnings.filterwarnings('ignore', message='remat is tested with PyTorch')",
            TorchVersionWarning,
            stacklevel=levels_to_user(),
        )


def _minor(release: str) -> tuple[int, ...]:
    """Return major and minor version as numbers: ``(2, 13)`` for ``"2.13.0+cpu"``."""
    return _numbers(release)[:2]


def _numbers(release: str) -> tuple[int, ...]:
    """Return major, minor and patch version as numbers."""
    return tuple(int(n) for n in re.findall(r"\d+", release)[:3])


def is_before(release: str) -> bool:
    """Return whether the installed PyTorch is older than a release, such as ``"2.14.1"``."""
    import torch

    return _numbers(torch.__version__) < _numbers(release)


@functools.cache
def holds_tangents() -> bool:
    """Return whether autograd holds the gradients of a compiled step's outputs until the step's backward ends.

    From PyTorch 2.13 on, backward frees the gradient of each output after the gradient's last use.
    """
    return is_before("2.13")


def replace_inductor(backend: type[Any]) -> None:
    """Replace `CompileWithInductor`, which ``torch.compile`` instantiates for Inductor, by a subclass of it."""
    import torch

    torch._TorchCompileInductorWrapper = backend  # type: ignore[misc]


def schema(op: Any) -> Any:
    """Return the schema of an operator overload."""
    return op._schema


def cache_key(compiled: Any) -> str | None:
    """Return the key of a compiled graph in Inductor's cache; None if the graph is not cached."""
    key = getattr(compiled, "_fx_graph_cache_key", None)
    return key if isinstance(key, str) else None


def registered_at(op: Any) -> str:
    """Return the source file that registered an operator overload; empty if unknown."""
    from torch import _C

    declared = schema(op)
    name = declared.name + (f".{declared.overload_name}" if declared.overload_name else "")
    for line in _C._dispatch_dump(name).splitlines():
        if line.startswith("debug: registered at "):
            return line.removeprefix("debug: registered at ").rpartition(":")[0]
    return ""


def overload_name(op: Any) -> str:
    """Return an overload's own name: ``Tensor`` for ``aten.add.Tensor``, ``default`` if unnamed."""
    return str(op._overloadname)


def qualified_name(packet: Any) -> str:
    """Return the name of an operator packet as ``namespace::name``."""
    return str(packet._qualified_op_name)


def overload_of(definition: Any) -> Any:
    """Return the operator overload of a ``torch.library.custom_op`` definition."""
    return definition._opoverload


def function_of(definition: Any) -> Any:
    """Return the user's function that ``torch.library.custom_op`` turned into a definition."""
    return definition._init_fn


def autograd_function(node: Any) -> Any:
    """Return the ``autograd.Function`` class that created a node of autograd's graph.

    The result is None if no ``autograd.Function`` created the node.
    """
    return getattr(node, "_forward_cls", None)


def saved_numbers(node: Any) -> tuple[Any, ...]:
    """Return the numbers that a compiled forward saved for its backward, such as values of symbolic sizes.

    Args:
        node: the node of autograd's graph that runs the compiled backward.
    """
    return tuple(getattr(node, "symints", None) or ())


def storage_id(storage: Any) -> int:
    """Return a number that is unique among all live storages, including those of fake tensors."""
    return storage._cdata  # type: ignore[no-any-return]


def version(tensor: Any) -> int:
    """Return the version counter of a tensor; each in-place write increments the counter."""
    return tensor._version  # type: ignore[no-any-return]


def has_symbolic_sizes(tensor: Any) -> bool:
    """Return whether any size or stride of a tensor is symbolic."""
    return tensor._has_symbolic_sizes_strides  # type: ignore[no-any-return]


def mark_alike(tensor: Any, like: Any) -> None:
    """Copy to a tensor the marks that ``torch._dynamo.mark_dynamic`` has set on another tensor."""
    kinds = ("_indices", "_range", "_bounds", "_overrides", "_ids")
    for name, value in vars(like).items():
        marks = name.startswith("_dynamo_") and name.endswith(kinds)
        if marks or name in ("_has_dynamo_dim_marking", "_specialize_on"):
            setattr(tensor, name, value)


def parameters_of(module: Any) -> dict[str, Any]:
    """Return the dictionary of a module's own parameters; a write to the dictionary changes the module."""
    return module._parameters  # type: ignore[no-any-return]


def buffers_of(module: Any) -> dict[str, Any]:
    """Return the dictionary of a module's own buffers; a write to the dictionary changes the module."""
    return module._buffers  # type: ignore[no-any-return]


def rename(node: fx.Node, name: str) -> None:
    """Rename a node; if the name is taken, the graph adds a suffix."""
    node._rename(name)


def used_names(graph: fx.Graph) -> set[str]:
    """Return the set of all names that nodes of a graph have used so far; the graph updates this set."""
    return graph._graph_namespace._used_names


def codegen_of(graph: fx.Graph) -> Any:
    """Return the code generator of a graph."""
    return graph._codegen


def traced_frame() -> tuple[str, dict[str, Any]]:
    """Return the qualified name and the local variables of the function that Dynamo is tracing.

    The result is ("", {}) if Dynamo is tracing no function.
    """
    from remat.torch_compat import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx()
        return tracer.f_code.co_qualname, tracer.f_locals
    except AttributeError:
        return "", {}


def traced_code() -> CodeType | None:
    """Return the code object whose frame Dynamo is compiling; None if Dynamo is tracing no function."""
    from remat.torch_compat import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx()
        return tracer.output.root_tx.f_code  # type: ignore[no-any-return]
    except AttributeError:
        return None


def forget_sizes(code: CodeType) -> None:
    """Make Dynamo forget the sizes, strides and numbers with which code ran, so that it compiles static sizes next."""
    from remat.torch_compat import get_code_state

    place = code.co_filename, code.co_firstlineno, code.co_name
    for seen, state in get_code_state().items():
        if (seen.filename, seen.firstlineno, seen.name) == place:
            state.automatic_dynamic.clear()


def resumes_after_break() -> bool:
    """Return whether a graph break precedes the code that Dynamo is tracing."""
    return traced_frame()[0].rpartition(".")[2].startswith("torch_dynamo_resume_in_")


def mark_boxed(function: Any) -> None:
    """Mark a compiled function as boxed: it takes one list of arguments and empties that list."""
    function._boxed_call = True


def quick_copier(graph: fx.Graph, source: fx.Graph) -> Callable[..., None]:
    """Return a function that appends copies of nodes to a graph, faster than ``Graph.node_copy``.

    The returned function takes nodes of ``source`` and three more arguments. ``find`` is a function that maps each
    node among the arguments of a copied node to the argument of the copy. ``copies`` is a dict from nodes to their
    copies, to which the function adds the new copies. If ``taken`` is True, the function appends a placeholder of the
    same name for each node instead of a copy.
    """
    from torch import _C, fx

    make, initialise = fx.Node.__new__, _C._NodeBase.__init__
    # ``Node.__setattr__`` updates the graph's lookup table on every write, which is slow. The table has no metadata, so
    # metadata are written without ``Node.__setattr__``.
    set_meta = _C._NodeBase.meta.__set__  # type: ignore[attr-defined]
    map_arg, append = _C._fx_map_arg, graph._root._prepend
    namespace = graph._graph_namespace
    names, used = namespace._obj_to_name, namespace._used_names
    namespace._base_count.update(source._graph_namespace._base_count)
    table = graph._find_nodes_lookup_table.table
    calls: dict[int, dict[fx.Node, None]] = {}  # by id, since hashing an operator overload is slow

    def run(
        nodes: Iterable[fx.Node],
        find: Callable[[fx.Node], Any],
        copies: dict[fx.Node, fx.Node],
        *,
        taken: bool,
    ) -> None:
        for node in nodes:
            op, name, target = node.op, node.name, node.target
            args: Any = node._args
            kwargs: Any = node._kwargs
            if taken:
                op, target, args, kwargs = "placeholder", name, (), {}
            if args:
                args = map_arg(args, find)
            if kwargs:
                kwargs = map_arg(kwargs, find)
            copy = make(fx.Node)
            if name in used:
                name = namespace.create_name(name, None)
            initialise(copy, graph, name, op, target, node.type)
            copy._update_args_kwargs(args, kwargs)
            set_meta(copy, node.meta.copy())
            append(copy)
            used.add(name)
            names[copy] = name
            row = calls.get(id(target)) if op == "call_function" else table[op, None]
            if row is None:
                row = calls[id(target)] = table[op, target]
            row[copy] = None
            graph._len += 1
            copies[node] = copy

    return run

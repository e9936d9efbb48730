"""Decide which operators are known to be pure functions of their inputs.

For PyTorch's own operators, schemas and tags state which operators write, draw random numbers or have an effect.
Schemas of custom operators may omit writes, random draws and effects. A custom operator that draws random numbers or
counts its calls can have the schema of a pure operator. Therefore a custom operator runs exactly once per call in a
step, until it is declared pure.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch

from remat import torch_compat
from remat.errors import ProblemError
from remat.torch_compat import (
    OPDEFS,
    CustomOpDef,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)

Op = TypeVar("Op")

#: Namespaces of operators that ship with PyTorch and torchvision. ``symm_mem`` and ``_dtensor`` are left out on
#: purpose: their operators move data between ranks, but are not in the namespaces of collectives.
_SHIPPED = (
    "aten prim prims quantized _quantized quantized_decomposed quantization mkldnn mkldnn_prepacked onednn "
    "mkl sparse xnnpack prepacked inductor inductor_prims rngprims debugprims c10d c10d_functional "
    "_c10d_functional _c10d_functional_autograd fsdp profiler static_runtime export onnx onnx_symbolic "
    "_native torchvision"
)
_NAMESPACES = frozenset(_SHIPPED.split())

#: Namespaces in which PyTorch registers its own Python functions as custom operators. The value is the package of
#: ``torch`` that defines these functions.
_WRITTEN_IN_PYTHON = {
    "prims": "_prims",
    "rngprims": "_prims",
    "onnx": "onnx",
    "onnx_symbolic": "onnx",
    "_c10d_functional": "distributed",
}

#: Path fragments of the C++ files in which PyTorch and torchvision register operators. They tell shipped
#: operators from operators that other packages add to the same namespaces.
_FILES = ("aten/src/ATen/", "torch/csrc/", "torchvision/csrc/")

#: Top-level packages whose Python functions and higher-order operators have no undeclared effects.
_MODULES = frozenset(("torch", "remat", "operator", "_operator", "math", "builtins"))

#: PyTorch's higher-order operators that call code that no graph contains.
_CALLS_ANYTHING = (
    "call_torchbind",
    "invoke_leaf_function",
    "executorch_call_delegate",
    "aoti_call_delegate",
    "inductor_compiled_code",
)

#: Names (`name_of`) of the operators declared pure in this process.
_DECLARED: set[str] = set()
#: Names that `also_declared` adds for the job that runs in this thread.
_ALSO: ContextVar[frozenset[str]] = ContextVar("_ALSO", default=frozenset())


def declare_pure(op: Op) -> Op:
    """Declare an operator to be a function of its inputs: equal inputs give equal results.

    A declared operator may run again in backward to save memory, and equal calls in a step may be
    merged into one. Without a declaration, a custom operator runs exactly as often as the step
    calls it. remat cannot check whether a declaration is true. Gradients are wrong if a declared
    operator draws random numbers, counts its calls, or reads changing state.

    Declare operators before a model is compiled, because a declaration does not change steps that
    this process has compiled. After a declaration, ``torch.compiler.reset()`` makes PyTorch compile
    all steps again. A change of declarations invalidates plans and compiled steps in disk caches.
    A plugin declares its operators with the hook ``remat_operators``.

    Args:
        op: the operator, in one of these forms: the result of ``torch.library.custom_op``,
            ``torch.ops.namespace.name``, an overload of it, a higher-order operator, or a name. The
            name is ``"namespace::name"``, followed by ``".overload"`` to declare one overload only.

    Returns:
        ``op``, so that ``declare_pure`` can decorate above ``@torch.library.custom_op(…)``.

    Raises:
        ProblemError: ``op`` is not an operator, no operator is registered under the name, or the
            operator is known to draw random numbers or to have effects.
    """
    operators = _operators_of(op)
    for operator in operators:
        fault = _contradiction(operator)
        if fault is not None:
            raise ProblemError(
                f"operator '{name_of(operator)}' cannot be declared a function of its inputs: {fault}"
            )
    _DECLARED.update(map(name_of, operators))
    return op


def undeclare_pure(op: object) -> None:
    """Withdraw a declaration by `declare_pure`; do nothing for an undeclared operator.

    Args:
        op: the operator, in any form that `declare_pure` accepts.

    Raises:
        ProblemError: ``op`` is not an operator, or no operator is registered under the name.
    """
    _DECLARED.difference_update(map(name_of, _operators_of(op)))


def declared() -> tuple[str, ...]:
    """Return the sorted names of all operators declared pure, including those of an `also_declared` block."""
    return tuple(sorted(_DECLARED | _ALSO.get()))


@contextlib.contextmanager
def also_declared(names: Iterable[str]) -> Iterator[None]:
    """Treat operators with the given names as declared pure inside of a ``with`` block."""
    # A worker does a job under the declarations of another process. Names need not be registered here yet.
    token = _ALSO.set(_ALSO.get().union(names))
    try:
        yield
    finally:
        _ALSO.reset(token)


def is_declared(target: Any) -> bool:
    """Return whether `declare_pure` or an `also_declared` block declares an operator pure."""
    name = name_of(target)
    return name in _DECLARED or name in _ALSO.get()


@functools.cache
def has_complete_schema(target: Any) -> bool:
    """Return whether schema and tags state all effects of calling an operator or function."""
    if isinstance(target, OpOverloadPacket):
        return all(has_complete_schema(getattr(target, o)) for o in target.overloads())  # type: ignore[no-untyped-call]
    if isinstance(target, OpOverload):
        # By this tag, a custom operator too is a function of its inputs and of the generator.
        if torch.Tag.nondeterministic_seeded in target.tags:
            return True
        return is_shipped(target)
    if isinstance(target, HigherOrderOperator):
        return _module(type(target)) in _MODULES and target._name not in _CALLS_ANYTHING
    return _module(target) in _MODULES


@functools.cache
def is_shipped(target: OpOverload) -> bool:
    """Return whether PyTorch or torchvision itself, and no other package, registered an operator."""
    if target.namespace not in _NAMESPACES:
        return False
    package = str(Path(torch.__file__).parent)
    definition = OPDEFS.get(torch_compat.schema(target).name)
    if definition is not None:
        # Neither the namespace nor `__module__` proves the origin, because any package may set
        # them.
        function = torch_compat.function_of(definition)
        home = _WRITTEN_IN_PYTHON.get(target.namespace)
        return (
            home is not None
            and isinstance(function, FunctionType)
            and str(function.__module__).startswith(f"torch.{home}")
            and function.__code__.co_filename.startswith(package)
        )
    file = torch_compat.registered_at(target)
    if not file or any(part in file for part in _FILES):
        return True  # no file: registered by TorchScript, unknown to the dispatcher
    # If the file belongs to `torch.library`, code outside of PyTorch registered the operator through that
    # module. PyTorch's own modules appear with their own file.
    others = (str(Path(package, "library.py")), str(Path(package, "_library")))
    return file.startswith(package) and not file.startswith(others)


def name_of(target: Any) -> str:
    """Return ``namespace::name`` or ``namespace::name.overload`` of an operator, or a function's qualified name."""
    if isinstance(target, OpOverload):
        name, overload = str(torch_compat.schema(target).name), torch_compat.overload_name(target)
        return name if overload == "default" else f"{name}.{overload}"
    if isinstance(target, OpOverloadPacket):
        return str(torch_compat.qualified_name(target))
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target._name}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target))}"


def _module(definition: Any) -> str:
    """Return the top-level package of a function or class."""
    return str(getattr(definition, "__module__", "")).partition(".")[0]


def _operators_of(op: object) -> list[Any]:
    """Return the operators that the argument of `declare_pure` denotes."""
    if isinstance(op, str):
        return _named(op)
    if isinstance(op, CustomOpDef):
        return [torch_compat.overload_of(op)]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, o) for o in op.overloads()]  # type: ignore[no-untyped-call]
    if isinstance(op, (OpOverload, HigherOrderOperator)):
        return [op]
    raise ProblemError(
        f"{op!r:.80} is no operator; expected its name as 'namespace::name', what "
        "torch.library.custom_op returned, or torch.ops.namespace.name"
    )


def overload_named(name: str) -> Any:
    """Return the operator registered under a name, such as ``"aten::add.Tensor"`` or ``"higher_order::cond"``.

    A name without an overload, such as ``"aten::mm"``, means the default one.

    Raises:
        ProblemError: no operator is registered under the name.
    """
    has_overload = "." in name or name.startswith("higher_order::")
    return _named(name if has_overload else f"{name}.default")[0]


def _named(name: str) -> list[Any]:
    namespace, colons, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if not (colons and namespace and base):
        raise ProblemError(
            f"'{name}' names no operator; expected 'namespace::name', as in 'mine::attention'"
        )
    if namespace == "higher_order" and (higher_order := torch_compat.higher_order_ops.get(rest)):
        return [higher_order]
    schemas = torch_compat.jit_get_schemas_for_operator(f"{namespace}::{base}")
    # A text may contain any name. Only names that the dispatcher knows are looked up on `torch.ops`.
    overloads = sorted(s.overload_name or "default" for s in schemas)
    if not overloads:
        raise ProblemError(
            f"no operator '{namespace}::{base}' is registered in this process; check the name, or "
            "import the package that registers it first"
        )
    if overload and overload not in overloads:
        raise ProblemError(
            f"operator '{namespace}::{base}' has no overload '{overload}'; it has {', '.join(overloads)}"
        )
    packet = getattr(getattr(torch.ops, namespace), base)
    return [getattr(packet, o) for o in ([overload] if overload else overloads)]


def _contradiction(op: Any) -> str | None:
    """Return the reason why an operator cannot be pure; None if no reason is known."""
    if torch_compat.get_effect(op) is not None:
        return "an effect is registered for it"
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
        return "its tag nondeterministic_seeded says that it draws random numbers"
    return None

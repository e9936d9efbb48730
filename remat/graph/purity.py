"""Which operators are known to be functions of their inputs: PyTorch's own, and those declared to be.

Of PyTorch's own operators, schemas and tags say which write, draw random numbers or have an effect. Of
anybody else's they need not: a custom operator that draws inside, or counts its calls, looks like one
that does not. So an operator from elsewhere runs once in a step, until somebody says that it may run
again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
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

#: Namespaces of the operators that come with PyTorch, and with what it is released with. What moves data
#: between ranks under another name than the collectives' (``symm_mem``, ``_dtensor``) is left out.
_SHIPPED = (
    "aten prim prims quantized _quantized quantized_decomposed quantization mkldnn mkldnn_prepacked onednn "
    "mkl sparse xnnpack prepacked inductor inductor_prims rngprims debugprims c10d c10d_functional "
    "_c10d_functional _c10d_functional_autograd fsdp profiler static_runtime export onnx onnx_symbolic "
    "_native torchvision"
)
_NAMESPACES = frozenset(_SHIPPED.split())

#: Of these, the ones in which PyTorch registers functions of its own as custom operators, by its package in ``torch``.
_WRITTEN_IN_PYTHON = {
    "prims": "_prims",
    "rngprims": "_prims",
    "onnx": "onnx",
    "onnx_symbolic": "onnx",
    "_c10d_functional": "distributed",
}

#: What stands in the names of the C++ files that PyTorch and torchvision register operators in. Anybody
#: can add operators to their namespaces; those are registered elsewhere.
_FILES = ("aten/src/ATen/", "torch/csrc/", "torchvision/csrc/")

#: Where Python functions and higher-order operators that are known come from.
_MODULES = frozenset(("torch", "remat", "operator", "_operator", "math", "builtins"))

#: Higher-order operators of PyTorch that call what no graph shows.
_CALLS_ANYTHING = (
    "call_torchbind",
    "invoke_leaf_function",
    "executorch_call_delegate",
    "aoti_call_delegate",
    "inductor_compiled_code",
)

#: What has been declared, by `name_of`.
_DECLARED: set[str] = set()
#: What other processes have declared, by how many of their jobs are at work here.
_SENT: Counter[str] = Counter()
_SENDING = threading.Lock()


def declare_pure(op: Op) -> Op:
    """Declares an operator to be a function of its inputs: the same ones give the same result.

    It may then run again in backward to save memory, and once where a step asks for the same twice;
    otherwise a custom operator runs exactly as often as the step calls it. Nobody checks the declaration:
    gradients are wrong if the operator draws random numbers, counts its calls, or reads what changes.

    To be called before a model is compiled: a step that this process has compiled already goes on as it
    is, and nothing says so; ``torch.compiler.reset()`` after the declaration has it compiled anew. Plans
    and compiled steps in caches on disk are not used where declarations have changed. A plugin declares
    its operators by the hook ``remat_operators``.

    Args:
        op: the operator: its name ``"namespace::name"``, with ``".overload"`` for one overload alone;
            what ``torch.library.custom_op`` returned; ``torch.ops.namespace.name``, or an overload of
            it; a higher-order operator.

    Returns:
        What it was given, so that it can stand above ``@torch.library.custom_op(…)``.

    Raises:
        ProblemError: this is no operator, none is registered under the name, or it is known to draw
            random numbers or to have effects.
    """
    found = _found(op)
    for one in found:
        fault = _contradiction(one)
        if fault is not None:
            raise ProblemError(
                f"operator '{name_of(one)}' cannot be declared a function of its inputs: {fault}"
            )
    _DECLARED.update(map(name_of, found))
    return op


def undeclare_pure(op: object) -> None:
    """Withdraw a declaration of `declare_pure`; without a declaration, do nothing.

    Args:
        op: the operator, as in `declare_pure`.

    Raises:
        ProblemError: this is no operator, or none is registered under the name.
    """
    _DECLARED.difference_update(map(name_of, _found(op)))


def declared() -> tuple[str, ...]:
    """Names of what has been declared, sorted."""
    return tuple(sorted({*_DECLARED, *+_SENT}))


@contextlib.contextmanager
def also_declared(names: Iterable[str]) -> Iterator[None]:
    """For a job of another process: what was declared there holds here as long as the job runs.

    Args:
        names: from `declared`; an operator need not be registered here yet.
    """
    counted = Counter(names)
    with _SENDING:
        _SENT.update(counted)
    try:
        yield
    finally:
        with _SENDING:
            _SENT.subtract(counted)


def is_declared(target: Any) -> bool:
    """Whether an operator is declared a function of its inputs."""
    name = name_of(target)
    return name in _DECLARED or _SENT[name] > 0


@functools.cache
def has_complete_schema(target: Any) -> bool:
    """Whether schema and tags say all that calling an operator or function does beyond its result.

    PyTorch's own do. Of others, those do that are tagged ``nondeterministic_seeded``: they are functions
    of their inputs and of the generator.
    """
    if isinstance(target, OpOverloadPacket):
        return all(has_complete_schema(getattr(target, o)) for o in target.overloads())  # type: ignore[no-untyped-call]
    if isinstance(target, OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags:
            return True
        return is_shipped(target)
    if isinstance(target, HigherOrderOperator):
        return _module(type(target)) in _MODULES and target._name not in _CALLS_ANYTHING
    return _module(target) in _MODULES


@functools.cache
def is_shipped(target: OpOverload) -> bool:
    """Whether an operator was registered by PyTorch's own code, and not by others in its namespaces."""
    if target.namespace not in _NAMESPACES:
        return False
    package = str(Path(torch.__file__).parent)
    made = OPDEFS.get(torch_compat.schema(target).name)
    if made is not None:
        function = torch_compat.function_of(made)
        home = _WRITTEN_IN_PYTHON.get(target.namespace)
        return (
            home is not None
            and isinstance(function, FunctionType)
            and str(function.__module__).startswith(f"torch.{home}")
            and function.__code__.co_filename.startswith(package)
        )
    file = torch_compat.registered_at(target)
    if not file or any(part in file for part in _FILES):
        return True  # without a file: one of TorchScript's own, which no dispatcher knows
    # `torch.library.define` registers what anybody hands it; modules of PyTorch do so themselves.
    others = (str(Path(package, "library.py")), str(Path(package, "_library")))
    return file.startswith(package) and not file.startswith(others)


def name_of(target: Any) -> str:
    """The display name of an operator: ``namespace::name``, with ``.overload`` unless it is the default overload.

    Other things are called as they call themselves.
    """
    if isinstance(target, OpOverload):
        name, overload = str(torch_compat.schema(target).name), torch_compat.overload_name(target)
        return name if overload == "default" else f"{name}.{overload}"
    if isinstance(target, OpOverloadPacket):
        return str(torch_compat.qualified_name(target))
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target._name}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target))}"


def _module(thing: Any) -> str:
    """The package that a function or class comes from."""
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _found(op: object) -> list[Any]:
    """The overloads that are meant."""
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


def overload_named(name: str) -> OpOverload:
    """The overload that `name_of` calls by a name.

    Raises:
        ProblemError: none is registered under it.
    """
    found: OpOverload = _named(name if "." in name else f"{name}.default")[0]
    return found


def overload_names(namespace: str, name: str) -> list[str]:
    """Names of the overloads that the dispatcher knows of an operator, sorted; none: there is none."""
    schemas = torch_compat.jit_get_schemas_for_operator(f"{namespace}::{name}")
    return sorted(s.overload_name or "default" for s in schemas)


def _named(name: str) -> list[Any]:
    namespace, colons, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if not (colons and namespace and base):
        raise ProblemError(
            f"'{name}' names no operator; expected 'namespace::name', as in 'mine::attention'"
        )
    if namespace == "higher_order" and (found := torch_compat.higher_order_ops.get(rest)):
        return [found]
    known = overload_names(namespace, base)
    if not known:
        raise ProblemError(
            f"no operator '{namespace}::{base}' is registered in this process; check the name, or "
            "import the package that registers it first"
        )
    if overload and overload not in known:
        raise ProblemError(
            f"operator '{namespace}::{base}' has no overload '{overload}'; it has {', '.join(known)}"
        )
    packet = getattr(getattr(torch.ops, namespace), base)
    return [getattr(packet, o) for o in ([overload] if overload else known)]


def _contradiction(op: Any) -> str | None:
    """Known effects of an operator that contradict a declaration."""
    if torch_compat.get_effect(op) is not None:
        return "an effect is registered for it"
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
        return "its tag nondeterministic_seeded says that it draws random numbers"
    return None

"""Classify operators, for example as views, recomputable, compute-intensive, random, or with effects.

The sets of an `OpTaxonomy` hold operator packets (``torch.ops.aten.mm``) and Python functions. An overload belongs to
the sets of its packet. A plugin's hook ``remat_operators`` returns a taxonomy, whose operators are added to the sets
of `default_taxonomy()`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import purity
from remat.graph.memory.writes import STATISTICS, written_by, written_places, written_statistics

Target = Any

#: Operators that read only the shape of their first argument, or overwrite the argument entirely.
_CONTENT_FREE = frozenset((
    "bernoulli", "normal_functional", "uniform", "exponential", "geometric", "cauchy", "log_normal", "random", "fill",
    "zero", "sym_size", "sym_stride", "sym_numel", "new_zeros", "new_ones", "new_full",
))  # fmt: skip
#: Operators that allocate memory without writing it.
_UNINITIALISED = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
)
#: Operators that read memory which another operator wrote in the form of a library, such as oneDNN.
_READ_PRIVATE_MEMORY = frozenset(
    ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTaxonomy:
    """Sets of operators, grouped by how costly and how safe it is to recompute their results.

    Attributes:
        recomputable: cheap operators, recomputed freely: pointwise operators, reductions.
        compute_intensive: expensive operators: matrix products, convolutions, attention.
        views: operators whose result aliases their first argument; recomputing a view costs
            nothing.
        pure: custom operators declared to be functions of their inputs, which may run again (see
            `remat.declare_pure`). Operators in ``recomputable`` and ``views`` count as pure too.
    """

    recomputable: set[Target] = field(default_factory=set)
    compute_intensive: set[Target] = field(default_factory=set)
    views: set[Target] = field(default_factory=set)
    pure: set[Target] = field(default_factory=set)

    def may_run_again(self, target: Target) -> bool:
        """Return whether the taxonomy lists an operator as pure, recomputable or a view."""
        target = packet(target)
        return target in self.pure or target in self.recomputable or target in self.views

    def is_view(self, node: fx.Node) -> bool:
        return packet(node.target) in self.views

    def is_recomputable(self, node: fx.Node) -> bool:
        target = packet(node.target)
        return target in self.recomputable or target in self.views or is_pointwise(node.target)

    def is_compute_intensive(self, node: fx.Node) -> bool:
        return packet(node.target) in self.compute_intensive

    def is_fusible(self, node: fx.Node) -> bool:
        """Return whether a compiler can fuse the node with its neighbours."""
        return self.is_recomputable(node) or is_random(node)


def packet(target: Target) -> Target:
    """Return the operator packet of an overload; return any other target unchanged."""
    return target.overloadpacket if isinstance(target, torch_compat.OpOverload) else target


def name_of(target: Target) -> str:
    """Return the name of a function, or the name of an operator without namespace and overload."""
    return str(getattr(packet(target), "__name__", ""))


def text_of(target: Target) -> str:
    """Return a call target's full name, equal in every process: ``aten.mm.default``, ``_operator.getitem``."""
    if isinstance(target, (torch_compat.OperatorBase, torch_compat.OpOverloadPacket)):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


@functools.cache
def is_pointwise(target: Target) -> bool:
    """Return whether any overload of the operator carries PyTorch's pointwise tag."""
    target = packet(target)
    if not isinstance(target, torch_compat.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(target, o).tags for o in target.overloads())  # type: ignore[no-untyped-call]


def reads_private_memory(target: Any) -> bool:
    """Return whether an operator reads memory in a library's private format, so that generated numbers may crash it.

    For example, backward of a recurrent layer reads memory that oneDNN wrote in forward. Zeros in this memory crash
    oneDNN.
    """
    return name_of(target) in _READ_PRIVATE_MEMORY


def is_random(node: fx.Node) -> bool:
    """Return whether the node draws from a random generator, so that a second run gives another result.

    A higher-order operator is random if a graph or an operator that it calls is random.
    """
    if isinstance(node.target, torch_compat.HigherOrderOperator):
        return any(map(is_seeded, called_operators(node))) or any(
            is_random(n) or n.target is _RUN_AND_SAVE for n in nested_nodes(node)
        )
    return is_random_call(node.target, node.args, node.kwargs)


def is_random_call(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws from a random generator; False for any higher-order operator."""
    if not is_seeded(target):
        return False
    # Attention without dropout draws nothing, although its tag says so.
    position = _dropout_position(target)
    if position is None:
        return True
    # A dropout probability that is a symbol may be positive, so the call counts as random.
    p = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
    return not (isinstance(p, (int, float)) and p == 0)


@functools.cache
def _dropout_position(target: Target) -> int | None:
    """Return the position of ``dropout_p`` among an operator's arguments; None if there is no such argument."""
    names = [argument.name for argument in torch_compat.schema(target).arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@functools.cache
def is_seeded(target: Target) -> bool:
    """Return whether an operator's tags state that it may draw from a random generator."""
    return (
        isinstance(target, torch_compat.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def is_plain(node: fx.Node) -> bool:
    """Return whether the node's result depends on its arguments alone, without side effects.

    A plain node draws no random numbers, writes to no argument, communicates with no rank and
    returns no uninitialised memory. Whether a node is plain depends on its operator alone.
    """
    return node.op != "call_function" or (_is_plain(node.target) and is_known(node.target))


@functools.cache
def _is_plain(target: Target) -> bool:
    return not (
        isinstance(target, torch_compat.HigherOrderOperator)
        or is_seeded(target)
        or written_places(target)
        or target in STATISTICS
        or _is_impure(target)
        or _is_collective(target)
        or name_of(target) in _UNINITIALISED
    )


#: Higher-order operator that runs an operator. It returns the generator state from before the run, and the result.
_RUN_AND_SAVE = torch_compat.rng_prims.run_and_save_rng_state
#: Higher-order operators that save a generator state and run an operator, or run an operator from a saved
#: state.
_REPLAYS = (
    _RUN_AND_SAVE,
    torch_compat.rng_prims.run_with_rng_state,
    torch_compat.rng_prims.graphsafe_run_with_rng_state,
)


def is_opaque(node: fx.Node) -> bool:
    """Return whether a node may have undeclared effects, as a custom operator may, so that it must run just once."""
    return node.op == "call_function" and bool(opaque_operators(node))


def opaque_operators(node: fx.Node) -> list[Target]:
    """Return the operators that a node runs and that may have undeclared effects."""
    return [op for op in _operators_run(node) if not is_known(op)]


def declared_operators(node: fx.Node) -> list[str]:
    """Return the names of the operators that a node runs and that only a declaration states to be pure."""
    if node.op != "call_function":
        return []
    run = (t for t in _operators_run(node) if not purity.has_complete_schema(t))
    return [purity.name_of(t) for t in run if _is_declared(t)]


def declarations() -> list[str]:
    """Return the sorted names of all operators that users and plugins declared pure in this process."""
    ops = default_taxonomy()
    listed = ops.pure | ops.recomputable | ops.views
    named = {purity.name_of(t) for t in listed if not purity.has_complete_schema(t)}
    return sorted({*purity.declared(), *named})


def is_known(target: Target) -> bool:
    """Return whether an operator's effects are fully known from its schema, its tags or a declaration of purity."""
    return purity.has_complete_schema(target) or _is_declared(target)


def _is_declared(target: Target) -> bool:
    return purity.is_declared(target) or default_taxonomy().may_run_again(target)


def may_have_effects(node: fx.Node) -> bool:
    """Return whether running the node twice, or not at all, may change what the user observes."""
    return is_random(node) or is_effectful(node) or is_opaque(node) or is_unread_collective(node)


def is_drawn_from_state(node: fx.Node) -> bool:
    """Return whether a node saves or restores a random generator's state, and then runs a random operator."""
    return node.target in _REPLAYS


def draws_in_order(node: fx.Node) -> bool:
    """Return whether a node may advance a random generator, so that it must not move past other such nodes."""
    return is_random(node) or node.target is _RUN_AND_SAVE or is_opaque(node)


def is_uninitialised(node: fx.Node) -> bool:
    """Return whether the node allocates memory without writing to it."""
    return name_of(node.target) in _UNINITIALISED


def ignores_content(node: fx.Node) -> bool:
    """Return whether the node reads only the shape of its first argument or overwrites that argument fully."""
    name = name_of(node.target)
    return name.endswith("_like") or name in _CONTENT_FREE


def is_collective(node: fx.Node) -> bool:
    """Return whether all ranks must run the node together, because it is or calls a collective."""
    return any(_is_collective(call.target) for call in _calls(node))


def is_unread_collective(node: fx.Node) -> bool:
    """Return whether a node is a collective, or a wait for a collective, whose result no node reads."""
    # Another rank may read the result, and would wait for this rank forever without the node.
    return not node.users and is_collective(node)


@functools.cache
def _is_collective(target: Target) -> bool:
    return getattr(target, "namespace", None) in ("_c10d_functional", "c10d_functional")


def is_mutating(node: fx.Node) -> bool:
    """Return whether the node writes to one of its arguments."""
    return bool(written_by(node))


def is_effectful(node: fx.Node) -> bool:
    """Return whether running the node twice, or not at all, has an observable effect.

    Random draws (`is_random`) are not treated as effects. A higher-order operator has the effects of the
    graphs that it calls, too.
    """
    return node.op == "call_function" and any(map(_has_effect, _calls(node)))


def _has_effect(node: fx.Node) -> bool:
    if isinstance(node.target, torch_compat.HigherOrderOperator):
        with_effects = torch.ops.higher_order.with_effects
        return node.target is with_effects or bool(node.is_impure(impure_random=False))
    return _is_impure(node.target) or bool(written_statistics(node.target, node.args))


@functools.cache
def _is_impure(target: Target) -> bool:
    """Return whether every call of a function has an effect beyond its result."""
    # PyTorch lists `wait_tensor` among its side-effectful functions, so that dead-code elimination
    # keeps it.
    if packet(target) is getattr(torch.ops._c10d_functional, "wait_tensor", None):
        return False
    return bool(torch_compat.is_impure(target, impure_random=False))


def attribute_of(module: object, target: object) -> Any:
    """Return the attribute of a module under a plain or dotted name; None if the module has no such attribute."""
    try:
        return operator.attrgetter(str(target))(module)
    except AttributeError:
        return None


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graph modules that a node's higher-order operator takes as arguments, in argument order."""
    owner = node.graph.owning_module
    modules: list[fx.GraphModule] = []
    if owner is None or not isinstance(node.target, torch_compat.HigherOrderOperator):
        return modules
    for arg in node.all_input_nodes:
        sub = attribute_of(owner, arg.target) if arg.op == "get_attr" else None
        if isinstance(sub, fx.GraphModule):
            modules.append(sub)
    return modules


def called_operators(node: fx.Node) -> list[Target]:
    """Return the operators that a node's higher-order operator, such as ``auto_functionalized``, takes as arguments."""
    # A replay leaves the generator unchanged, so the random operator in it does not count. `run_and_save_rng_state`
    # advances the generator, for which `draws_in_order` accounts.
    if not isinstance(node.target, torch_compat.HigherOrderOperator) or node.target in _REPLAYS:
        return []
    kinds = (torch_compat.OpOverload, torch_compat.HigherOrderOperator)
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, kinds)]


def nested_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the call nodes of the graphs that a node's higher-order operator takes as arguments."""
    for module in subgraphs(node):
        yield from (n for n in module.graph.nodes if n.op == "call_function")


@functools.cache
def default_taxonomy() -> OpTaxonomy:
    """Return the taxonomy of PyTorch's operators: one instance per process, which plugins extend in place."""
    operators = {
        field: {
            getattr(namespace, name)
            for namespace, names in (
                (torch.ops.aten, aten),
                (torch.ops.prims, prims),
                (torch.ops.higher_order, higher_order),
            )
            for name in names.split()
            # An operator may be missing from a version or build of PyTorch.
            if hasattr(namespace, name)
        }
        for field, (aten, prims, higher_order) in _KNOWN.items()
    }
    operators["recomputable"].update([operator.getitem, *symbol_operators()])
    return OpTaxonomy(**operators)


#: For each set of the taxonomy, the names of operators in aten, in prims, and of higher-order operators.
#: `reshape` and `_unsafe_view` are not listed as views, because they may copy.
_KNOWN = {
    "views": (
        "squeeze unsqueeze alias view slice t transpose expand as_strided permute select split "
        "split_with_sizes unbind detach diagonal unfold view_as_real view_as_complex",
        "broadcast_in_dim",
        "",
    ),
    "recomputable": (
        "add sub div atan2 mul max min pow remainder fmod __and__ __or__ __xor__ __lshift__ "
        "__rshift__ eq ne ge gt le lt abs bitwise_not ceil floor frac neg relu round silu trunc "
        "log log10 log1p log2 lgamma exp expm1 erf erfc cos acos cosh sin asin sinh tan atan tanh "
        "atanh sqrt rsqrt reciprocal sigmoid softplus threshold threshold_backward clamp where "
        "lerp addcmul gelu gelu_backward sum mean _grad_sum_to_size sum_to_size amax to type_as "
        "rsub _to_copy clone full_like var std _unsafe_view reshape broadcast_tensors "
        "scalar_tensor ones new_zeros lift_fresh_copy lift_fresh arange triu var_mean isinf any "
        "full zeros empty empty_like argmax maximum index gather zeros_like",
        "div convert_element_type prepare_softmax_online var sum iota "
        "_low_memory_max_pool_offsets_to_indices inductor_lookup_seed",
        "",
    ),
    "compute_intensive": (
        "mm bmm addmm baddbmm convolution convolution_backward mkldnn_rnn_layer _cudnn_rnn "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_flash_attention_forward _efficient_attention_forward upsample_bilinear2d _scaled_mm "
        "_grouped_mm",
        "",
        "flex_attention flex_attention_backward",
    ),
}


def _calls(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a call node and, recursively, the call nodes of the graphs that it takes as arguments."""
    yield node
    for inner in nested_nodes(node):
        yield from _calls(inner)


def _operators_run(node: fx.Node) -> Iterable[Target]:
    """Return every operator that a call node runs, also in nested graphs, without repeats."""
    calls = _calls(node)
    # A dict keeps the order of the calls, unlike a set.
    return dict.fromkeys(op for call in calls for op in (call.target, *called_operators(call)))


def symbol_operators() -> list[Callable[..., Any]]:
    """Return the arithmetic operators on symbolic sizes, which are always cheap."""
    from torch.fx.experimental.sym_node import magic_methods, method_to_operator

    return [method_to_operator(m) for m in magic_methods]

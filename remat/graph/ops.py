"""The taxonomy of operators: what fuses, what is worth keeping, what draws random numbers.

Sets hold operator packets (``torch.ops.aten.mm``) or Python functions; an overload belongs where
its packet does. `default_taxonomy()` is extended in place with
`OpTaxonomy.extend`, by plugins for instance.
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
from remat.graph.writes import written_places

Target = Any

#: Operators that look at no number of their first argument, only at its shape, or overwrite it wholly.
_CONTENT_FREE = frozenset(
    [
        "bernoulli",
        "normal_functional",
        "uniform",
        "exponential",
        "geometric",
        "cauchy",
        "log_normal",
        "random",
        "fill",
        "zero",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "new_zeros",
        "new_ones",
        "new_full",
    ]
)
#: Operators that allocate memory without writing it.
_UNINITIALISED = frozenset(
    ["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTaxonomy:
    """Sets of operators, by what recomputing them means.

    Attributes:
        recomputable: cheap enough to recompute without asking: pointwise, reductions, views.
        compute_intensive: never recomputed for free: products, convolutions, attention.
        views: alias their first argument; recomputing one costs nothing.
        pure: custom operators that are functions of their inputs, so that they may run again (see
            `remat.declare_pure`). What is recomputable or a view is taken to be one too.
    """

    recomputable: set[Target] = field(default_factory=set)
    compute_intensive: set[Target] = field(default_factory=set)
    views: set[Target] = field(default_factory=set)
    pure: set[Target] = field(default_factory=set)

    def extend(
        self,
        *,
        recomputable: Iterable[Target] = (),
        compute_intensive: Iterable[Target] = (),
        views: Iterable[Target] = (),
        pure: Iterable[Target] = (),
    ) -> None:
        """Adds operator packets; an overload is taken for its packet."""
        for known, more in (
            (self.recomputable, recomputable),
            (self.compute_intensive, compute_intensive),
            (self.views, views),
            (self.pure, pure),
        ):
            known.update(map(packet, more))

    def may_run_again(self, target: Target) -> bool:
        """Whether an operator was named as one that is a function of its inputs."""
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
        """Whether a fusing compiler can merge the node into its neighbours."""
        return self.is_recomputable(node) or is_random(node)


def packet(target: Target) -> Target:
    """The operator packet of an overload; anything else is returned as it is."""
    return target.overloadpacket if isinstance(target, torch_compat.OpOverload) else target


def name_of(target: Target) -> str:
    """The name of an operator without its namespace and overload, or of a function."""
    return str(getattr(packet(target), "__name__", ""))


def text_of(target: Target) -> str:
    """Name of the call target, equal in every process: ``aten.mm.default``, ``_operator.getitem``."""
    if isinstance(target, (torch_compat.OperatorBase, torch_compat.OpOverloadPacket)):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


@functools.cache
def is_pointwise(target: Target) -> bool:
    """Whether any overload of the operator carries PyTorch's pointwise tag."""
    target = packet(target)
    if not isinstance(target, torch_compat.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(target, o).tags for o in target.overloads())  # type: ignore[no-untyped-call]


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a generator: run twice, it gives two different answers.

    Operators that expand a seed they are given are pure. Attention without dropout is not random. A
    higher-order operator is what is inside of the graphs, and what are the operators, that it calls.
    """
    if isinstance(node.target, torch_compat.HigherOrderOperator):
        return any(map(_is_seeded, called_operators(node))) or any(
            is_random(n) or n.target is _RUN_AND_SAVE for n in nested_nodes(node)
        )
    return is_random_call(node.target, node.args, node.kwargs)


def is_random_call(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """As `is_random`, for an operator that is called now; false for higher-order ones."""
    if not _is_seeded(target):
        return False
    position = _dropout_position(target)
    if position is None:
        return True
    p = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
    return not (isinstance(p, (int, float)) and p == 0)


@functools.cache
def _dropout_position(target: Target) -> int | None:
    """Position of the argument that asks attention to drop something; None for other operators."""
    names = [argument.name for argument in torch_compat.schema(target).arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@functools.cache
def _is_seeded(target: Target) -> bool:
    return (
        isinstance(target, torch_compat.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def is_plain(node: fx.Node) -> bool:
    """Whether the operator is nothing but a function of its arguments, whatever those are.

    It never draws, writes, communicates, has an effect, or leaves memory as it finds it, and all this
    is known. This is asked once per operator instead of all those questions once per node.
    """
    return node.op != "call_function" or (_is_plain(node.target) and is_known(node.target))


@functools.cache
def _is_plain(target: Target) -> bool:
    return not (
        isinstance(target, torch_compat.HigherOrderOperator)
        or _is_seeded(target)
        or written_places(target)
        or _is_impure(target)
        or _is_collective(target)
        or name_of(target) in _UNINITIALISED
    )


#: Runs an operator and tells the state of the generator before it.
_RUN_AND_SAVE = torch_compat.rng_prims.run_and_save_rng_state
#: Operators that run another one from a given state of the generator, and leave the generator as it was.
_REPLAYS = (
    _RUN_AND_SAVE,
    torch_compat.rng_prims.run_with_rng_state,
    torch_compat.rng_prims.graphsafe_run_with_rng_state,
)


def is_opaque(node: fx.Node) -> bool:
    """Whether the effects of the node's operator are undeclared (`remat.graph.purity`).

    It may draw random numbers, count its calls, or read what changes; so it runs once, where it stands.
    A higher-order operator is what is inside of the graphs, and what are the operators, that it calls.
    """
    return node.op == "call_function" and bool(opaque_operators(node))


def opaque_operators(node: fx.Node) -> list[Target]:
    """The undeclared operators that a node runs; see `is_opaque`."""
    return [op for op in _operators_run(node) if not is_known(op)]


def declared_operators(node: fx.Node) -> list[str]:
    """Names of the operators that a node runs and that are known by a declaration alone."""
    if node.op != "call_function":
        return []
    run = (t for t in _operators_run(node) if not purity.has_complete_schema(t))
    return [purity.name_of(t) for t in run if _is_declared(t)]


def declarations() -> list[str]:
    """Names of everything that is declared in this process, by users and by plugins."""
    ops = default_taxonomy()
    listed = ops.pure | ops.recomputable | ops.views
    named = {purity.name_of(t) for t in listed if not purity.has_complete_schema(t)}
    return sorted({*purity.declared(), *named})


def is_known(target: Target) -> bool:
    """Whether schema, tags or a declaration say all that an operator does beyond its result."""
    return purity.has_complete_schema(target) or _is_declared(target)


def _is_declared(target: Target) -> bool:
    return purity.is_declared(target) or default_taxonomy().may_run_again(target)


def may_have_effects(node: fx.Node) -> bool:
    """Whether running the node twice, or not at all, would or might be noticed: it draws, has an
    effect, or is not known to be a function of its inputs."""
    return is_random(node) or is_effectful(node) or is_opaque(node)


def is_drawn_from_state(node: fx.Node) -> bool:
    """Whether the node runs a random operator and saves, or is given, the state of the generator."""
    return node.target in _REPLAYS


def draws_in_order(node: fx.Node) -> bool:
    """Whether running the node moves a generator on, or might, so that other draws may not pass it."""
    return is_random(node) or node.target is _RUN_AND_SAVE or is_opaque(node)


def is_uninitialised(node: fx.Node) -> bool:
    """Whether the node allocates memory without writing it."""
    return name_of(node.target) in _UNINITIALISED


def ignores_content(node: fx.Node) -> bool:
    """Whether the node looks only at the shape of what it is given, not at the numbers."""
    name = name_of(node.target)
    return name.endswith("_like") or name in _CONTENT_FREE


def is_collective(node: fx.Node) -> bool:
    """Whether every rank must run the node together: itself, or something in a graph that it calls."""
    return any(_is_collective(call.target) for call in _calls(node))


@functools.cache
def _is_collective(target: Target) -> bool:
    return getattr(target, "namespace", None) in ("_c10d_functional", "c10d_functional")


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return bool(written_places(node.target))


def is_effectful(node: fx.Node) -> bool:
    """Whether running the node twice, or not at all, has an observable effect.

    Random operators are told apart by `is_random`; waiting for a collective may be repeated. A
    higher-order operator also has the effects of the graphs it calls.
    """
    return node.op == "call_function" and any(map(_has_effect, _calls(node)))


def _has_effect(node: fx.Node) -> bool:
    if isinstance(node.target, torch_compat.HigherOrderOperator):
        with_effects = torch.ops.higher_order.with_effects
        return node.target is with_effects or bool(node.is_impure(impure_random=False))
    return _is_impure(node.target)


@functools.cache
def _is_impure(target: Target) -> bool:
    """Whether any call of a function has an effect beyond its result."""
    if packet(target) is getattr(torch.ops._c10d_functional, "wait_tensor", None):
        return False
    return bool(torch_compat.is_impure(target, impure_random=False))


def attribute_of(module: object, target: object) -> Any:
    """The attribute of a module under a plain or dotted name; None if absent."""
    try:
        return operator.attrgetter(str(target))(module)
    except AttributeError:
        return None


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator is given to call, in argument order."""
    owner = node.graph.owning_module
    found: list[fx.GraphModule] = []
    if owner is None or not isinstance(node.target, torch_compat.HigherOrderOperator):
        return found
    for arg in node.all_input_nodes:
        sub = attribute_of(owner, arg.target) if arg.op == "get_attr" else None
        if isinstance(sub, fx.GraphModule):
            found.append(sub)
    return found


def called_operators(node: fx.Node) -> list[Target]:
    """The operators that a higher-order operator is given to call, as ``auto_functionalized`` is.

    What replays a draw is not asked: it leaves the generator as it found it.
    """
    if not isinstance(node.target, torch_compat.HigherOrderOperator) or node.target in _REPLAYS:
        return []
    kinds = (torch_compat.OpOverload, torch_compat.HigherOrderOperator)
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, kinds)]


def nested_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The calls in the graphs that a higher-order operator is given to call."""
    for module in subgraphs(node):
        yield from (n for n in module.graph.nodes if n.op == "call_function")


@functools.cache
def default_taxonomy() -> OpTaxonomy:
    """The taxonomy of PyTorch's operators, the same in 2.13 to 2.15; the one instance that is extended."""
    known = {
        field: {
            getattr(namespace, name)
            for namespace, names in (
                (torch.ops.aten, aten),
                (torch.ops.prims, prims),
                (torch.ops.higher_order, higher_order),
            )
            for name in names.split()
            if hasattr(namespace, name)
        }
        for field, (aten, prims, higher_order) in _KNOWN.items()
    }
    known["recomputable"].update([operator.getitem, *_symbol_operators()])
    return OpTaxonomy(**known)


#: By set of the taxonomy: operators of aten, of prims, and higher-order ones. `reshape` and
#: `_unsafe_view` may copy: recomputing them is cheap, but they are no views.
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
    """A call, and those in the graphs that it is given to call, however deep."""
    yield node
    for inner in nested_nodes(node):
        yield from _calls(inner)


def _operators_run(node: fx.Node) -> Iterable[Target]:
    """Everything that a call runs: its operator, those it is given to call, those in its graphs."""
    calls = _calls(node)
    return dict.fromkeys(op for call in calls for op in (call.target, *called_operators(call)))


def _symbol_operators() -> list[Callable[..., Any]]:
    """Arithmetic on symbolic sizes: always cheap."""
    from torch.fx.experimental.sym_node import magic_methods, method_to_operator

    return [method_to_operator(m) for m in magic_methods]

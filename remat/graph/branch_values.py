"""Find branch values, and the values that forward must keep so that backward takes the same branches.

A *branch value* decides which function a step computes. Branch values are indices, ranks, counts, floats cast to
integers, and comparisons that reach an output. If backward computed a branch value again from numbers that are
rounded differently, backward would differentiate another function than forward computed. How a kernel rounds a value
depends on the operators fused with it, so nearly all floating-point operators may round differently in a second run.
Exact operators, such as views, gathers and maxima, give the same bits in every run.

A branch value may run again only if it is computed from *settled* values, which are the
same bit for bit in every plan. A settled value is an input, a value that is never recomputed, or an
exact function of settled values.

The mask of a continuous function such as ReLU, which only multiplies gradients, is no branch value. Near the mask's
threshold, the function has nearly the same value on both sides. Values that backward compares with their maximum are
never recomputed. If backward rounded the values differently than forward did, none of the values would equal the
maximum, and the gradient would be 0/0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat
from remat.errors import PlanError
from remat.graph import ops
from remat.graph.capture.source import located
from remat.graph.index import GraphIndex, index_graph
from remat.graph.joint import JointGraph, output_node
from remat.graph.memory.storages import leaves_of
from remat.graph.memory.writes import by_target
from remat.graph.policies import TAGGED_BY
from remat.graph.problems.replays import is_element, maker_of
from remat.graph.roles import Roles, classify

#: Names of operators, by kind.
_KINDS = {
    # Select, move, compare, negate or count numbers without rounding, besides views and casts.
    "exact": "getitem clone contiguous copy lift_fresh lift_fresh_copy _unsafe_view reshape view_copy "
    "detach_copy cat stack index index_select gather take take_along_dim embedding where masked_fill "
    "masked_scatter scatter select_scatter slice_scatter diagonal_scatter flip roll repeat "
    "repeat_interleave constant_pad_nd tril triu tile broadcast_tensors expand_copy permute_copy neg abs "
    "relu clamp clamp_min clamp_max hardtanh maximum minimum fmax fmin max min amax amin aminmax topk sort "
    "kthvalue median nanmedian mode cummax cummin histc _local_scalar_dense item max_pool2d_with_indices "
    "max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d _low_memory_max_pool_with_offsets",
    "cast": "_to_copy to type_as convert_element_type",
    # Rounded alike in every kernel (IEEE 754), if nothing else is fused between them.
    "arithmetic": "add sub rsub mul div reciprocal",
    # Return one of the values that they compare. A comparison with the result finds which value that was.
    "selecting": "max min amax amin aminmax topk kthvalue median nanmedian mode sort cummax cummin "
    "linalg_vector_norm scatter_reduce index_reduce segment_reduce",
    # Discontinuous functions whose result is a float. Backward of a step may need another step, such as the floor of a
    # quotient for the gradient of a remainder; it is then a branch value, too.
    "step": "round floor ceil trunc fix frac fmod remainder floor_divide histc",
    # Discontinuous functions that derivatives of continuous functions use as masks. Factors of a matrix jump where
    # singular values or eigenvalues are equal, and their signs are those of rounding errors.
    "jump": "sign sgn heaviside hardshrink threshold copysign atan2 angle _linalg_svd _linalg_eigh linalg_eig",
    # Tell finite numbers from others, which no rounding changes, but for float16, which overflows early.
    "finite check": "isnan isinf isfinite isposinf isneginf",
    # Random operators that may read probabilities from a tensor, or that draw until a number is accepted.
    "weighted draw": "multinomial bernoulli poisson binomial _standard_gamma _sample_dirichlet",
    # Continuous functions that PyTorch decomposes into comparisons, casts or steps. Their comparisons decide
    # between pieces that meet, such as x and 0.01 * x of a leaky ReLU. Names are without "_backward".
    "continuous": "leaky_relu elu celu selu softplus hardswish hardsigmoid hardtanh relu relu6 prelu "
    "_prelu_kernel rrelu_with_noise log_sigmoid_forward log_sigmoid softshrink smooth_l1_loss huber_loss "
    "nan_to_num logaddexp logaddexp2 logsumexp xlogy special_xlog1py special_entr logit clamp clamp_min "
    "clamp_max binary_cross_entropy mish gelu silu _softmax _log_softmax _safe_softmax threshold_backward "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d "
    "grid_sampler_3d _embedding_bag _embedding_bag_forward_only _euclidean_dist linalg_vector_norm norm "
    "_cdist_forward native_dropout "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d "
    "fractional_max_pool2d fractional_max_pool3d _low_memory_max_pool_with_offsets",
}
#: Metadata key that marks a node as part of a decomposed continuous function; see `is_piece`.
PIECE = "remat_piece_of_continuous"
_NAMES = {kind: frozenset(names.split()) for kind, names in _KINDS.items()}
#: Names of discontinuous functions, and of tests for infinities and NaN.
DISCONTINUOUS, FINITE_CHECKS = _NAMES["step"] | _NAMES["jump"], _NAMES["finite check"]
_JUMPING = {
    ("linalg_vector_norm", "ne"),
    ("norm", "ne"),
    ("grid_sampler_2d", "round"),
    ("grid_sampler_3d", "round"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBranches:
    """Nodes that must not run a second time, so that backward takes the same branches as forward.

    Attributes:
        branches: positions of branch values.
        compared: positions of values that backward compares with their maximum.
    """

    branches: frozenset[int] = frozenset()
    compared: frozenset[int] = frozenset()

    def __contains__(self, position: int) -> bool:
        return position in self.branches or position in self.compared


def fix_branches(
    index: GraphIndex,
    roles: Roles,
    *,
    runs_again: Callable[[int], bool] = lambda _: True,
    is_tagged: Callable[[int], bool] = lambda _: False,
) -> FixedBranches:
    """Find the nodes that must not run a second time, so that backward takes the same branches as forward.

    Args:
        index: node positions of the joint graph.
        roles: classification of the nodes as forward or backward.
        runs_again: whether all rules but the one on branch values allow the node at a position to run again.
        is_tagged: whether a checkpoint policy asks to recompute the node at a position.
    """
    graph = Branches(index, roles)
    # A branch value that only backward needs runs in backward, so its inputs are kept instead.
    in_backward = {i for i in graph.branch_values if not roles.required_forward[i]}
    to_keep, compared = set(graph.branch_values - in_backward), set[int]()
    for i in (*graph.comparisons, *sorted(in_backward)):
        sources = [j for j in graph.sources(i) if runs_again(j)]
        # A tag asks to recompute a compared value, so the comparison is kept instead.
        if any(map(is_tagged, sources)):
            to_keep.add(i)
        else:
            compared.update(sources)
    if not to_keep:
        return FixedBranches(compared=frozenset(compared))
    branches: set[int] = set()
    identical = bytearray(len(index))
    for i, node in enumerate(index.nodes):
        if roles.tangent_closure[i]:
            continue
        inputs_are_identical = all(identical[j] for j in index.inputs[i])
        if i in to_keep and runs_again(i) and not inputs_are_identical:
            branches.add(i)
        identical[i] = (
            node.op != "call_function"
            or i in to_keep
            or i in compared
            or not runs_again(i)
            or graph.ignores_floats(i)
            or (inputs_are_identical and graph.is_exact(i))
        )
    return FixedBranches(branches=frozenset(branches), compared=frozenset(compared))


def branches_on_16_bits(index: GraphIndex, roles: Roles) -> list[int]:
    """Return the positions of the branch values that forward computes from 16-bit floats.

    A kernel of Inductor may keep a 16-bit float in 32 bits, depending on the operators in the kernel.
    """
    graph = Branches(index, roles)
    # Whether each node depends on a float of 16 bits that may be unrounded.
    rounded = bytearray(len(index))
    for i, node in enumerate(index.nodes):
        if node.op == "call_function" and not (roles.tangent_closure[i] or graph.ignores_floats(i)):
            rounded[i] = any(rounded[j] for j in index.inputs[i]) or (
                not graph.is_exact(i) and any(map(is_16_bits, leaves_of(index.values[i])))
            )
    return sorted(i for i in graph.branch_values | graph.comparisons if rounded[i])


def branches_of_forward(forward: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes of a forward module that compute branch values."""
    joint = JointGraph(
        graph_module=forward, num_fwd_outputs=len(leaves_of(output_node(forward.graph).args))
    )
    index = index_graph(forward.graph)
    return {index.nodes[i] for i in Branches(index, classify(joint, index)).branch_values}


def has_16_bits(graph: fx.Graph) -> bool:
    """Return whether any node of a graph computes a tensor of bfloat16 or float16."""
    values = (n.meta.get("val") for n in graph.nodes)
    return any(is_16_bits(v) for value in values for v in leaves_of(value))


class Branches:
    """Branch values and exact operators of a joint graph.

    Args:
        index: node positions of the joint graph.
        roles: classification of the nodes as forward or backward.

    Attributes:
        branch_values: positions of the branch values, without ``comparisons``.
        comparisons: positions of comparisons with a maximum, or another selected element, that
            only backward needs.
    """

    def __init__(self, index: GraphIndex, roles: Roles) -> None:
        self._index, self._required = index, roles.required_forward
        self._is_float = [_has_float(value) for value in index.values]
        inside = [
            i
            for i, may_branch in enumerate(by_target(index.nodes, _may_branch))
            # Most operators whose result is a float do not branch. Nor does an operator that reads no floats.
            if (
                may_branch or not self._is_float[i] or not isinstance(index.values[i], torch.Tensor)
            )
            and not roles.tangent_closure[i]
            and index.nodes[i].op == "call_function"
            and self._floats(i)
        ]
        self.branch_values = frozenset(filter(self._is_branch, inside))
        self.comparisons = frozenset(i for i in inside if self._is_gradient_of_selection(i))

    def _floats(self, i: int) -> list[int]:
        """Return the positions of those inputs of a node whose values are floats."""
        return [j for j in self._index.inputs[i] if self._is_float[j]]

    @cached_property
    def _constants(self) -> bytearray:
        """For each node, whether it computes its numbers only from sizes or random draws; see `_is_constant`."""
        constant = bytearray(len(self._index))
        for i in range(len(constant)):
            constant[i] = self._is_constant(i, constant)
        return constant

    def is_exact(self, i: int) -> bool:
        """Return whether a node computes the same result from the same inputs, bit for bit, in every kernel."""
        node, value = self._index.nodes[i], self._index.values[i]
        name = ops.name_of(node.target)
        if name in _NAMES["cast"]:
            return self._is_exact_cast(i)
        if (
            name in _NAMES["exact"]
            or i in self.branch_values
            or ops.default_taxonomy().is_view(node)
        ):
            return True
        return not any(map(_is_float, leaves_of(value)))

    def ignores_floats(self, i: int) -> bool:
        """Return whether a node's result does not depend on the contents of the floats that the node reads.

        A random operator that reads no float also counts as independent of floats, because a replay draws the same
        numbers.
        """
        node = self._index.nodes[i]
        if self._constants[i]:
            return True
        if not self._floats(i):
            # A quotient of integers, for example, may be rounded by a kernel.
            return self.is_exact(i) or _is_draw(node) or not self._index.inputs[i]
        return ops.ignores_content(node) and not _draws_by_weight(node)

    def sources(self, i: int) -> list[int]:
        """Return the nearest ancestors of node ``i`` whose results a second run may round differently."""
        rounding: set[int] = set()
        stack, seen = [*self._index.inputs[i]], {i}
        while stack:
            j = stack.pop()
            if j in seen or self._index.nodes[j].op != "call_function" or self.ignores_floats(j):
                continue
            seen.add(j)
            if self.is_exact(j):
                stack.extend(self._index.inputs[j])
            else:
                rounding.add(j)
        return sorted(rounding)

    def _is_constant(self, i: int, constant: bytearray) -> bool:
        """Return whether a node computes its numbers, such as positions, only from sizes or random draws."""
        node, value = self._index.nodes[i], self._index.values[i]
        if node.op != "call_function":
            return isinstance(value, torch.SymInt)
        if _is_draw(node):
            return not self._floats(i)
        reads = self._index.inputs[i]
        if not all(constant[j] for j in reads) or is_16_bits(value):
            return False
        return not reads or ops.name_of(node.target) in _NAMES["arithmetic"] or self.is_exact(i)

    def _is_branch(self, i: int) -> bool:
        node, value, needed = self._index.nodes[i], self._index.values[i], self._required[i]
        name = ops.name_of(node.target)
        if ops.is_random(node):
            return _draws_by_weight(node)
        if called := ops.subgraphs(node):  # a loop, a condition or a region
            return any(map(branches_of_forward, called)) and "attention" not in name
        if name in _NAMES["step"] or (name == "div" and node.kwargs.get("rounding_mode")):
            return not _is_part_of_continuous(node)
        if _jumps_by_option(node):
            return needed
        if name in _NAMES["jump"]:
            return needed and not _is_part_of_continuous(node)
        if "max_pool" in name and self._reads_indices(i):
            return True
        if not _has_discrete(value) or ops.ignores_content(node):
            return False
        if self._is_comparison(i) and not needed:
            return False
        # Attention and the like return seeds and sizes beside their floats.
        returns_seeds = ops.default_taxonomy().is_compute_intensive(node) or "attention" in name
        return (
            not (returns_seeds or name == "getitem")
            and not self._checks_finite(i)
            and not _is_part_of_continuous(node)
        )

    def _is_gradient_of_selection(self, i: int) -> bool:
        """Return whether a node that only backward needs compares values with a selected element, such as a maximum."""
        if self._required[i] or not self._is_comparison(i):
            return False
        return any(map(self._selects, self._floats(i)))

    def _is_comparison(self, i: int) -> bool:
        node, value = self._index.nodes[i], self._index.values[i]
        is_bool = isinstance(value, torch.Tensor) and value.dtype is torch.bool
        return is_bool and ops.is_pointwise(node.target) and not self._checks_finite(i)

    def _checks_finite(self, i: int) -> bool:
        """Return whether a comparison only tells finite from nonfinite numbers, so that rounding does not matter."""
        node = self._index.nodes[i]
        if self._overflows(i):
            return False
        if ops.name_of(node.target) in FINITE_CHECKS:
            return True
        if len(node.args) < 2:
            return False
        other = node.args[1]
        return other is node.args[0] or (isinstance(other, float) and not math.isfinite(other))

    def _overflows(self, i: int) -> bool:
        """Return whether a node reads float16 values, which a kernel may compute beyond the range of float16."""
        values = (self._index.values[j] for j in self._floats(i))
        return any(
            v.dtype is torch.float16 for value in values for v in leaves_of(value) if _is_float(v)
        )

    def _reads_indices(self, i: int) -> bool:
        """Return whether forward needs the indices that the max pooling at node ``i`` returns, as for an unpooling."""
        index = self._index
        return any(
            self._required[j] and is_element(index.nodes[j]) and _has_discrete(index.values[j])
            for j in index.users[i]
        )

    def _selects(self, j: int) -> bool:
        """Return whether a value is a selected element, such as a maximum, or an exact function of such an element."""
        while self._index.nodes[j].op == "call_function":
            node = self._index.nodes[j]
            # `max` of two tensors compares element by element, and its gradient has no quotient.
            name = ops.name_of(node.target)
            by_element = name in ("max", "min") and len(self._floats(j)) > 1
            if name in _NAMES["selecting"] and not by_element:
                return True
            if len(self._floats(j)) != 1 or not self.is_exact(j):
                return False
            (j,) = self._floats(j)
        return False

    def _is_exact_cast(self, i: int) -> bool:
        values, value = self._index.values, self._index.values[i]
        sources = [values[j] for j in self._index.inputs[i]][:1]
        if all(_is_lossless(source, value) for source in sources):
            return True
        # Random numbers are drawn and cast in the kernel that compares them. Any other reader may save them rounded.
        is_random = any(_is_draw(self._index.nodes[j]) for j in self._index.inputs[i])
        return is_random and all(self._is_comparison(j) for j in self._index.users[i])


def check_may_branch_again(node: fx.Node) -> None:
    """Refuse the checkpoint tag MUST_RECOMPUTE on a branch value that a second run could change.

    Raises:
        PlanError: the user's code tags the node MUST_RECOMPUTE.
    """
    is_own = node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
    if is_own and TAGGED_BY not in node.meta:
        raise PlanError(
            f"'{node.name}' is tagged MUST_RECOMPUTE, but {maker_of(node).target} returns a branch value, such as an index or "
            "the result of a comparison, of numbers that a second run may round otherwise. Backward would then "
            "take another branch than forward did. Let the policy answer MUST_SAVE or PREFER_RECOMPUTE for it (remat saves it then), "
            f"or MUST_SAVE for what it reads\n  {located(node)}"
        )


def _may_branch(node: fx.Node) -> bool:
    """Return whether a node's operator can compute a branch value although the operator's result is a float."""
    name = ops.name_of(node.target)
    return (
        not isinstance(node.target, torch_compat.OpOverload)
        or ops.is_seeded(node.target)
        or name in DISCONTINUOUS
        or name in ("div", "norm", "linalg_vector_norm")
        or "grid_sampler" in name
        or "max_pool" in name
    )


def _is_float(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.dtype.is_floating_point or value.dtype.is_complex)
    return isinstance(value, torch.SymFloat)


def _has_float(value: Any) -> bool:
    """Return whether a value is a float, or a tuple that contains a float."""
    return (
        _is_float(value)
        if isinstance(value, torch.Tensor)
        else any(map(_is_float, leaves_of(value)))
    )


def _has_discrete(value: Any) -> bool:
    """Return whether a value is an integer or a bool, or a tuple that contains one."""
    if isinstance(value, torch.Tensor):
        return not _is_float(value)
    return any(
        isinstance(v, (torch.SymInt, torch.SymBool))
        # Tensors of uint8 in a tuple are internal buffers of an operator.
        or (isinstance(v, torch.Tensor) and v.dtype is not torch.uint8 and not _is_float(v))
        for v in leaves_of(value)
    )


def is_16_bits(value: Any) -> bool:
    """Return whether a value is a tensor of bfloat16 or float16."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _is_lossless(source: Any, value: Any) -> bool:
    """Return whether a cast of ``source`` to ``value`` keeps every number; True for any cast to integers or bools."""
    if not isinstance(source, torch.Tensor) or not _is_float(value) or source.dtype is torch.bool:
        return True
    if not _is_float(source):
        return not is_16_bits(value)
    if source.is_complex() and not value.is_complex():
        return False
    narrow, wide = torch.finfo(source.dtype), torch.finfo(value.dtype)
    return wide.eps <= narrow.eps and wide.max >= narrow.max and wide.tiny <= narrow.tiny


def _draws_by_weight(node: fx.Node) -> bool:
    """Return whether a node is a random operator that reads its probabilities from a tensor."""
    name = ops.name_of(node.target)
    return name in _NAMES["weighted draw"] and not (name == "bernoulli" and len(node.args) > 1)


def _is_draw(node: fx.Node) -> bool:
    return ops.name_of(node.target) == "inductor_random" or ops.is_random(node)


def _is_part_of_continuous(node: fx.Node) -> bool:
    return _is_continuous(node.target) or is_piece(node)


def is_piece(node: fx.Node) -> bool:
    """Return whether a comparison, cast or step is part of a continuous function that PyTorch decomposed.

    PyTorch records the decomposed operator in a node's metadata. In a graph read from text, the
    metadata key `PIECE` marks parts of decomposed functions.
    """
    if node.meta.get(PIECE):
        return True
    original = node.meta.get("original_aten")
    if original is None or not _is_continuous(original) or _is_continuous(node.target):
        return False
    # Of these functions, one form jumps: a norm of order 0 counts, and a nearest sample is rounded to.
    if (ops.name_of(original), ops.name_of(node.target)) in _JUMPING:
        return False
    return ops.name_of(node.target) in _NAMES["step"] or _has_discrete(node.meta.get("val"))


def _jumps_by_option(node: fx.Node) -> bool:
    """Return whether a node samples a grid at the nearest point, or computes a norm of order 0 (a count)."""
    name, args = ops.name_of(node.target), node.args
    if "grid_sampler" in name:
        return bool(len(args) > 2 and args[2] == 1)
    return bool(name in ("linalg_vector_norm", "norm") and len(args) > 1 and args[1] == 0)


def _is_continuous(target: Any) -> bool:
    name = ops.name_of(target)
    return bool(_NAMES["continuous"].intersection((name, name.removesuffix("_backward"))))

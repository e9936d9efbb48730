"""Pairs of hooks that pack and unpack saved tensors: the class of all pairs, and the ready-made pairs.

As for `torch.autograd.graph.saved_tensors_hooks`, ``pack`` turns a saved tensor into a value to keep
until backward, and ``unpack`` turns the value into a tensor again. The ready-made pairs restore
infinities and NaN exactly, and keep the largest finite numbers finite. Additive attention masks contain
infinities or the largest finite numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from remat.errors import PlanError, ProblemError, RematError, summary
from remat.graph import ops
from remat.graph.memory.host_copies import WAIT_COPIED, offload, reload

#: Valid values of `SavedTensorHooks.filter`.
FILTERS = ("donated", "no_static", "all")

#: Result of pack: a tensor, or tensors, sizes and constants in tuples, lists and dicts.
Packed = Any
Pack = Callable[[torch.Tensor], Packed]
Unpack = Callable[[Packed], torch.Tensor]


class HooksWarning(UserWarning):
    """Issued if saved-tensor hooks run outside the compiled graph, or pack no saved tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorHooks:
    """Pair of functions that pack saved tensors after forward and unpack them for backward.

    Attributes:
        pack: turns a saved tensor into the value to keep. If pack returns the tensor itself, the
            tensor is saved as it is.
        unpack: turns the kept value into a tensor of the saved tensor's shape, dtype and device.
        filter: which saved tensors to pack. ``"donated"``: only intermediate values, whose memory
            is freed once they are packed. ``"no_static"``: all tensors except parameters and static
            inputs. ``"all"``: all tensors. Packing a tensor that stays alive anyway adds memory.
        min_bytes: tensors with fewer bytes are not packed.
        lossy: whether unpack may return other numbers than pack received. A lossy pair packs only
            floating-point activations that become smaller. A lossy pair does not pack vectors, random
            numbers, or statistics with one number per row (the logsumexp of attention, the deviations
            of a normalisation). A lossy pair does not pack values from which backward computes a
            comparison, a step function or an index either.
        keeps_signs: whether unpack returns numbers with the signs of the packed numbers, and zeros for
            zeros. Numbers of negligible magnitude may become 0. A lossy pair with ``keeps_signs=True``
            also packs values of which backward reads only the sign, as the backward of a ReLU does.
        name: name of the hooks in pipelines and messages.

    Raises:
        ProblemError: an attribute has an invalid value.
    """

    pack: Pack
    unpack: Unpack
    filter: str = "donated"
    min_bytes: int = 0
    lossy: bool = False
    keeps_signs: bool = False
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise ProblemError(
                f"hooks: filter is {self.filter!r}; expected one of {', '.join(map(repr, FILTERS))}"
            )
        # `isinstance` would accept True.
        if type(self.min_bytes) is not int or self.min_bytes < 0:
            raise ProblemError(
                f"hooks: min_bytes is {self.min_bytes!r}; expected a number of bytes, an int >= 0"
            )
        for hook in ("pack", "unpack"):
            given = getattr(self, hook)
            # `register` uses hooks as keys of a dict.
            if not callable(given) or type(given).__hash__ is None:
                raise ProblemError(
                    f"hooks: {hook} is a {type(given).__name__}; expected a function or an "
                    "fx.GraphModule, which can be called and hashed"
                )

    @classmethod
    def of(cls, value: object) -> SavedTensorHooks:
        """Return hooks for ``value``: a `SavedTensorHooks`, the name of a ready-made pair, or a tuple of two functions.

        Args:
            value: a `SavedTensorHooks`, which is returned as it is; the name of a ready-made pair;
                or a tuple of two functions, pack and unpack.

        Raises:
            ProblemError: ``value`` gives no hooks in any of these three forms.
        """
        if isinstance(value, SavedTensorHooks):
            return value
        if isinstance(value, str) and value in PAIRS:
            return PAIRS[value]
        if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(callable, value)):
            return cls(pack=value[0], unpack=value[1])
        raise ProblemError(
            f"hooks is {value!r}; expected the name of a ready-made pair ({', '.join(PAIRS)}), a tuple "
            "(pack, unpack) of functions, or remat.SavedTensorHooks(pack=…, unpack=…)"
        )

    @property
    def cache_key(self) -> str | None:
        """Key that identifies the hooks in compile caches of all processes; None if no key can be formed.

        The cache key is a digest of the options of the hooks and, for a ready-made pair, the pair's name. For hooks
        that are not ready-made, the digest covers the attribute ``user_cache_hash`` of each function. For an
        ``fx.GraphModule``, the digest covers the operators, and the ``user_cache_hash`` of each wrapped leaf function.
        """
        key = PAIRS.get(self.name)
        # A user's pair may have the name of a ready-made one.
        ready_made = key is not None and (key.pack, key.unpack) == (self.pack, self.unpack)
        keys = [self.name] if ready_made else [_key_of(self.pack), _key_of(self.unpack)]
        if not all(keys):
            return None
        options = (self.filter, self.min_bytes, self.lossy, self.keeps_signs)
        return hashlib.sha256(repr((keys, options)).encode()).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle hooks by their cache key, or by value if there is no cache key."""
        # Inductor's cache pickles its options, which may hold hooks.
        if self.cache_key is None:
            return object.__reduce_ex__(self, protocol)
        return find, (register(self),)

    def __str__(self) -> str:
        return self.name


#: Registered hooks by key, and the key of each registered pair of hooks.
_HOOKS: dict[str, SavedTensorHooks] = {}
_KEYS: dict[SavedTensorHooks, str] = {}
_LOCK = threading.Lock()


def register(hooks: SavedTensorHooks) -> str:
    """Register hooks in this process, and return the key under which `find` finds the hooks."""
    # Compiled code that calls the hooks contains the returned key. If ``hooks.cache_key`` is not None, this cache key
    # is returned, which is the same in all processes. Otherwise, the returned key is valid in this process only.
    with _LOCK:
        key = _KEYS.setdefault(hooks, hooks.cache_key or f"process-{uuid.uuid4().hex}")
        _HOOKS[key] = hooks
    return key


def find(key: str) -> SavedTensorHooks:
    """Return the registered hooks with the given key.

    Raises:
        PlanError: no hooks with this key are registered in this process.
    """
    hooks = _HOOKS.get(key)
    if hooks is None:
        raise PlanError(
            f"saved-tensor hooks {key[:20]}… are not known in this process, which did not make the plan "
            "or the step that they belong to; hand the same hooks to remat.partitioner first"
        )
    return hooks


def check_unpacked(
    name: str, value: object, size: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the result of an unpack hook if the result has the saved tensor's size, dtype and device.

    Raises:
        PlanError: the result is no tensor, or has another size, dtype or device.
    """
    if not isinstance(value, torch.Tensor):
        raise PlanError(f"hooks '{name}': unpack returned {value!r}; expected a tensor")
    # `statically_known_true` adds no guards on symbolic sizes.
    fits = value.dim() == len(size) and all(
        statically_known_true(a == b) for a, b in zip(value.shape, size, strict=True)
    )
    if not fits or (value.dtype, value.device) != (dtype, device):
        raise PlanError(
            f"hooks '{name}': unpack returned {format_kind(value.shape, value.dtype, value.device)} for a "
            f"saved {format_kind(size, dtype, device)}; it must return a tensor like the one that was packed"
        )
    return value


@contextlib.contextmanager
def naming(which: str, kind: type[RematError]) -> Iterator[None]:
    """Convert any exception that a hook raises in the ``with`` block to an error that names the hook.

    Args:
        which: name of the hook in the message.
        kind: class of the error to raise; the hook's exception becomes the cause of the error. A
            `torch.OutOfMemoryError` is not converted.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # foreign code
        raise kind(f"{which} raised {summary(error)}") from error


def format_kind(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> str:
    """Return size, dtype and device as text, such as ``float32[2, 3] on cpu``."""
    return f"{str(dtype).removeprefix('torch.')}{list(size)} on {device}"


def _key_of(function: Callable[..., Any]) -> str | None:
    """Return a text that identifies a hook in all processes; None if the hook has no such text."""
    given = getattr(function, "user_cache_hash", None)
    if given is not None:
        return str(given)
    if not isinstance(function, fx.GraphModule):
        return None
    lines = []
    for node in function.graph.nodes:
        wrapped = node.meta.get("is_wrapped", False)
        if wrapped:
            leaf = node.meta.get("user_cache_hash") or getattr(node.target, "user_cache_hash", None)
            if leaf is None:
                return None
            lines.append(f"{leaf} {node.args} {node.kwargs}")
        elif node.op in ("get_attr", "call_module"):  # the text leaves out the values of tensors
            return None
        else:
            called = node.target if isinstance(node.target, str) else ops.text_of(node.target)
            lines.append(f"{node.name} {node.op} {called} {node.args} {node.kwargs}")
    return "\n".join(lines)


# Ready-made pairs ---------------------------------------------------------------------------------

# The pairs use `torch.where`, because it keeps the layout of a tensor, unlike `masked_fill`.
_INF = math.inf


def pack_bf16(x: torch.Tensor) -> Packed:
    """Return a float32 tensor as bfloat16, paired with its original dtype."""
    # The relative error is at most 1/256. A tensor of another dtype is returned as it is. This includes float64,
    # because float64 has a wider range than bfloat16, and the pair stores no scale.
    if x.dtype is not torch.float32:
        return x
    most = torch.finfo(torch.bfloat16).max
    values = x.clamp(-most, most).to(torch.bfloat16)  # unclamped, the largest would overflow
    values = torch.where(x == _INF, _INF, values)
    return torch.where(x == -_INF, -_INF, values), x.dtype


def unpack_bf16(packed: Packed) -> torch.Tensor:
    """Return the tensor that `pack_bf16` packed, in its original dtype."""
    values, dtype = packed
    return values.to(dtype)  # type: ignore[no-any-return]


#: float8_e4m3fn has no infinities, so its largest number, 448, stands for infinity. Finite values are
#: scaled to at most 416, the next smaller number, so no rounding yields 448.
_INFINITE8, _FINITE8 = 448.0, 416.0


def pack_float8(x: torch.Tensor) -> Packed:
    """Return a tensor as float8_e4m3fn, paired with one scale for the whole tensor."""
    # A tensor that is not floating-point, or has one byte per number, is returned as it is.
    # Full precision of float8_e4m3fn is a relative error of at most 1/16, for magnitudes that differ by a factor of
    # up to about 2^15. One scale is therefore enough for the largest numbers of every row, even if the magnitudes of
    # rows differ by a factor of 1,000. For these numbers, a scale per row would take memory and gain no precision.
    if not x.is_floating_point() or x.element_size() == 1:
        return x
    largest = torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0), float("inf"))
    # At least `tiny`: a tensor of zeros would have the scale 0, and x / 0 is NaN.
    scale = (largest / _FINITE8).clamp_min(torch.finfo(x.dtype).tiny)
    scaled = (x / scale).clamp(-_INFINITE8, _INFINITE8)
    return scaled.to(torch.float8_e4m3fn), scale


def unpack_float8(packed: Packed) -> torch.Tensor:
    """Return the tensor that `pack_float8` packed, in its original dtype, including infinities and NaN."""
    values, scale = packed
    most = torch.finfo(scale.dtype).max
    code = values.view(torch.uint8)
    value = (values.to(scale.dtype) * scale).clamp(-most, most)
    # 0x7E and 0xFE are the bit patterns of 448 and -448.
    value = torch.where(code == 0x7E, _INF, value)
    return torch.where(code == 0xFE, -_INF, value)


def pack_int8(x: torch.Tensor) -> Packed:
    """Return a tensor as int8, paired with one scale per row."""
    # A row runs along the last dimension. The finite numbers of a row are rounded to 253 evenly spaced values. A
    # tensor that is not floating-point, has one byte per number, or has no dimension is returned as it is.
    # The distance of two neighbouring values is at least the smallest normal number of the dtype. In float16, this
    # limits the precision of rows whose largest magnitude is below 0.008.
    if not x.is_floating_point() or x.element_size() == 1 or x.dim() == 0:
        return x
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    largest = torch.linalg.vector_norm(finite, float("inf"), -1, keepdim=True)
    # At least `tiny`: a row of zeros would have the scale 0, and x / 0 is NaN.
    scale = (largest / 126).clamp_min(torch.finfo(x.dtype).tiny)
    # Finite numbers use -126 to 126, so 127, -127 and -128 are free for infinities and NaN.
    steps = (x / scale).round().nan_to_num(nan=-128.0, posinf=127.0, neginf=-127.0)
    return steps.to(torch.int8), scale


def unpack_int8(packed: Packed) -> torch.Tensor:
    """Return the tensor that `pack_int8` packed, in its original dtype, including infinities and NaN."""
    values, scale = packed
    most = torch.finfo(scale.dtype).max
    value = (values.to(scale.dtype) * scale).clamp(-most, most)
    for code, number in ((127, _INF), (-127, -_INF), (-128, math.nan)):
        value = torch.where(values == code, number, value)
    return value  # type: ignore[no-any-return]


def pack_offload(x: torch.Tensor) -> Packed:
    """Return a copy of ``x`` in host memory, paired with the device of ``x``."""
    # A CPU tensor is returned as it is, which declines packing.
    return x if x.device.type == "cpu" else (WAIT_COPIED(offload(x), x), x.device)


def unpack_offload(packed: Packed) -> torch.Tensor:
    """Return a copy of the packed tensor on its original device."""
    values, device = packed
    return WAIT_COPIED(reload(values, device), values)  # type: ignore[no-any-return]


#: Ready-made pairs by name.
PAIRS: Mapping[str, SavedTensorHooks] = {
    h.name: h
    for h in (
        # Magnitudes below 2**-134 become 0.
        SavedTensorHooks(
            name="bf16", pack=pack_bf16, unpack=unpack_bf16, lossy=True, keeps_signs=True
        ),
        SavedTensorHooks(name="float8", pack=pack_float8, unpack=unpack_float8, lossy=True),
        SavedTensorHooks(name="int8", pack=pack_int8, unpack=unpack_int8, lossy=True),
        SavedTensorHooks(name="cpu-offload", pack=pack_offload, unpack=unpack_offload),
    )
}

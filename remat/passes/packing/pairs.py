"""Saved-tensor hooks, and ready-made pairs of them.

A pair is what `torch.autograd.graph.saved_tensors_hooks` takes: ``pack`` turns a saved tensor into
whatever is kept until backward, ``unpack`` turns that into the tensor again. The pairs here treat
what is not finite with care, since additive attention masks are made of it: infinities and NaN come
back as they were, and the largest finite numbers stay finite.
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
from remat.graph.host_copies import WAIT_COPIED, offload, reload

#: Which saved tensors hooks are for; see `SavedTensorHooks.filter`.
FILTERS = ("donated", "no_static", "all")

#: What pack returns: a tensor, or tensors, sizes and constants in tuples, lists and dicts.
Packed = Any
Pack = Callable[[torch.Tensor], Packed]
Unpack = Callable[[Packed], torch.Tensor]


class HooksWarning(UserWarning):
    """Hooks that run outside of the graph, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorHooks:
    """A pair of functions that saved tensors go through on their way from forward to backward.

    Attributes:
        pack: turns a saved tensor into what is kept. Returning the tensor itself declines: it is
            kept as it is.
        unpack: turns that into a tensor of the same shape, dtype and device.
        filter: which saved tensors they are for. ``"donated"``: only intermediates, whose memory
            goes once they are packed. ``"no_static"``: all but parameters and static inputs.
            ``"all"``. Packing what is alive anyway adds memory.
        min_bytes: smaller tensors are left as they are.
        lossy: what comes back is not what was given. Then only floating-point activations that get
            smaller are packed: no vectors, no statistics (the logsumexp of attention, the
            deviations of a normalisation: one number for each row), no random numbers, and nothing
            from which backward compares, rounds or computes indices anew, which decided something.
        keeps_signs: what comes back has the sign of what was given, and is 0 where that was, to within what no
            gradient shows: then values that backward only asks for their sign, as it does below a ReLU, are packed too.
        name: what they are called in pipelines and messages.
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
        if type(self.min_bytes) is not int or self.min_bytes < 0:
            raise ProblemError(
                f"hooks: min_bytes is {self.min_bytes!r}; expected a number of bytes, an int >= 0"
            )
        for what in ("pack", "unpack"):
            given = getattr(self, what)
            if not callable(given) or type(given).__hash__ is None:
                raise ProblemError(
                    f"hooks: {what} is a {type(given).__name__}; expected a function or an "
                    "fx.GraphModule, which can be called and hashed"
                )

    @classmethod
    def of(cls, value: object) -> SavedTensorHooks:
        """Hooks as they are, of a ready-made pair's name, or of a pair of functions.

        Raises:
            ProblemError: it is none of these.
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
        """What compiled artefacts with these hooks can be found by again; None: nothing can.

        Ready-made pairs are known. A function carries a ``user_cache_hash``; an ``fx.GraphModule``
        is known by its operators, and each wrapped leaf function in it by its own.
        """
        known = PAIRS.get(self.name)
        ready_made = known is not None and (known.pack, known.unpack) == (self.pack, self.unpack)
        keys = [self.name] if ready_made else [_key_of(self.pack), _key_of(self.unpack)]
        if not all(keys):
            return None
        options = (self.filter, self.min_bytes, self.lossy, self.keeps_signs)
        return hashlib.sha256(repr((keys, options)).encode()).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Hooks that are known by a key are pickled as that: Inductor's cache pickles its options."""
        if self.cache_key is None:
            return object.__reduce_ex__(self, protocol)
        return find, (register(self),)

    def __str__(self) -> str:
        return self.name


_HOOKS: dict[str, SavedTensorHooks] = {}
_KEYS: dict[SavedTensorHooks, str] = {}
_LOCK = threading.Lock()


def register(hooks: SavedTensorHooks) -> str:
    """A key by which the operators find the hooks.

    It names them in other processes too where they carry a cache key, so that compiled artefacts
    may hold it; else it is of this process alone.
    """
    with _LOCK:
        key = _KEYS.setdefault(hooks, hooks.cache_key or f"process-{uuid.uuid4().hex}")
        _HOOKS[key] = hooks
    return key


def find(key: str) -> SavedTensorHooks:
    """The hooks with a key.

    Raises:
        PlanError: this process does not know them.
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
    """What the unpack of hooks returned for a saved tensor of a kind.

    Raises:
        PlanError: it is no tensor, or one of another kind.
    """
    if not isinstance(value, torch.Tensor):
        raise PlanError(f"hooks '{name}': unpack returned {value!r}; expected a tensor")
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
    """Lets what a hook raises say which hook it is; the cause is chained.

    Args:
        which: the hook, as messages name it.
        kind: the error that is raised instead. That there is no memory left is told as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # foreign code
        raise kind(f"{which} raised {summary(error)}") from error


def format_kind(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> str:
    """A kind of tensor for people."""
    return f"{str(dtype).removeprefix('torch.')}{list(size)} on {device}"


def _key_of(function: Callable[..., Any]) -> str | None:
    """What a hook is known by from process to process, if by anything."""
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
        elif node.op in ("get_attr", "call_module"):  # its numbers are in no text
            return None
        else:
            called = node.target if isinstance(node.target, str) else ops.text_of(node.target)
            lines.append(f"{node.name} {node.op} {called} {node.args} {node.kwargs}")
    return "\n".join(lines)


# Ready-made pairs ---------------------------------------------------------------------------------

# `torch.where` keeps the layout of a tensor, which `masked_fill` does not.
_INF = math.inf


def pack_bf16(x: torch.Tensor) -> Packed:
    """Half of a float32, with three decimal digits left.

    A float64 is left as it is: a bfloat16 has the range of a float32, and no scale to bring others into it.
    """
    if x.dtype is not torch.float32:
        return x
    most = torch.finfo(torch.bfloat16).max
    kept = x.clamp(-most, most).to(torch.bfloat16)  # else the largest float32 rounds to infinity
    kept = torch.where(x == _INF, _INF, kept)
    return torch.where(x == -_INF, -_INF, kept), x.dtype


def unpack_bf16(packed: Packed) -> torch.Tensor:
    kept, dtype = packed
    return kept.to(dtype)  # type: ignore[no-any-return]


#: Largest finite number in a float8_e4m3fn, which has no infinities: it stands for them. Finite
#: values are scaled to at most the second largest but one, which no rounding takes up to it.
_INFINITE8, _FINITE8 = 448.0, 416.0


def pack_float8(x: torch.Tensor) -> Packed:
    """A byte for each number, e4m3fn, and one scale for the whole tensor.

    A float8 scales itself over 2^17, so that one scale serves rows whose sizes are up to a thousand
    times apart with the same relative precision, 1/16 at worst; a scale for each row would take room
    and buy nothing.
    """
    if not x.is_floating_point() or x.element_size() == 1:
        return x
    largest = torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0), float("inf"))
    scale = (largest / _FINITE8).clamp_min(torch.finfo(x.dtype).tiny)
    scaled = (x / scale).clamp(-_INFINITE8, _INFINITE8)
    return scaled.to(torch.float8_e4m3fn), scale


def unpack_float8(packed: Packed) -> torch.Tensor:
    kept, scale = packed
    most = torch.finfo(scale.dtype).max
    code = kept.view(torch.uint8)
    value = (kept.to(scale.dtype) * scale).clamp(-most, most)
    value = torch.where(code == 0x7E, _INF, value)
    return torch.where(code == 0xFE, -_INF, value)


def pack_int8(x: torch.Tensor) -> Packed:
    """A byte for each number, in 253 even steps, and one scale for each row (last dimension).

    No step is smaller than the smallest normal number of the dtype, which rows of a float16 whose
    largest number is below 0.008 notice.
    """
    if not x.is_floating_point() or x.element_size() == 1 or x.dim() == 0:
        return x
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    largest = torch.linalg.vector_norm(finite, float("inf"), -1, keepdim=True)
    scale = (largest / 126).clamp_min(torch.finfo(x.dtype).tiny)
    steps = (x / scale).round().nan_to_num(nan=-128.0, posinf=127.0, neginf=-127.0)
    return steps.to(torch.int8), scale


def unpack_int8(packed: Packed) -> torch.Tensor:
    kept, scale = packed
    most = torch.finfo(scale.dtype).max
    value = (kept.to(scale.dtype) * scale).clamp(-most, most)
    for code, number in ((127, _INF), (-127, -_INF), (-128, math.nan)):
        value = torch.where(kept == code, number, value)
    return value  # type: ignore[no-any-return]


def pack_offload(x: torch.Tensor) -> Packed:
    """The same bytes in the host's memory; what lies there already stays."""
    return x if x.device.type == "cpu" else (WAIT_COPIED(offload(x), x), x.device)


def unpack_offload(packed: Packed) -> torch.Tensor:
    kept, device = packed
    return WAIT_COPIED(reload(kept, device), kept)  # type: ignore[no-any-return]


#: The ready-made pairs by name.
PAIRS: Mapping[str, SavedTensorHooks] = {
    h.name: h
    for h in (
        # Numbers below 2**-134 become 0.
        SavedTensorHooks(
            name="bf16", pack=pack_bf16, unpack=unpack_bf16, lossy=True, keeps_signs=True
        ),
        SavedTensorHooks(name="float8", pack=pack_float8, unpack=unpack_float8, lossy=True),
        SavedTensorHooks(name="int8", pack=pack_int8, unpack=unpack_int8, lossy=True),
        SavedTensorHooks(name="cpu-offload", pack=pack_offload, unpack=unpack_offload),
    )
}

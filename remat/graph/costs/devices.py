"""Devices by their peak rates: from vendors' data sheets, or from a TOML file."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from remat.errors import ProblemError
from remat.files import write_atomic, writing

_RATES = {
    "half_tflops": "TFLOP/s",
    "single_tflops": "TFLOP/s",
    "memory_tbps": "TB/s",
    "ranks_tbps": "TB/s",
    "draws_tops": "10¹²/s",
    "tanh_tops": "10¹²/s",
    "pooled_tops": "10¹²/s",
}
#: Rates that a device may lack.
_OPTIONAL = ("ranks_tbps", "draws_tops", "tanh_tops", "pooled_tops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak rates of a device (dense, vendors' data sheets, or as measured).

    Attributes:
        name: what it is called, as in ``"roofline:NAME"``.
        label: name in tables; `name` where it is left empty.
        half_tflops: peak of bfloat16 and float16 matrix products, TFLOP/s.
        single_tflops: peak of float32 matrix products (TF32 where there is one), TFLOP/s.
        memory_tbps: memory bandwidth, TB/s.
        ranks_tbps: what a rank sends to others of its node at once, TB/s; 0: as much as its memory gives.
        draws_tops: random numbers, 10¹² a second; 0: as many as memory takes.
        tanh_tops: hyperbolic tangents, which GPT-2's GELU is made of, likewise.
        pooled_tops: elements that the windows of max pooling read, likewise.

    Raises:
        ProblemError: the name is empty, or a rate is no finite number above 0.
    """

    name: str
    label: str = ""
    half_tflops: float
    single_tflops: float
    memory_tbps: float
    ranks_tbps: float = 0.0
    draws_tops: float = 0.0
    tanh_tops: float = 0.0
    pooled_tops: float = 0.0

    def __post_init__(self) -> None:
        if fault := _fault(asdict(self)):
            raise ProblemError(f"device {self.name!r}: {fault}")
        if not self.label:
            object.__setattr__(self, "label", self.name)

    @property
    def sent_per_ps(self) -> float:
        """Bytes that a rank sends to others in a picosecond."""
        return self.ranks_tbps or self.memory_tbps

    def flops_per_ps(self, dtype: torch.dtype) -> float:
        """Operations per picosecond, which is the number of TFLOP/s."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.half_tflops
        if dtype.is_floating_point and dtype.itemsize == 1:
            return 2 * self.half_tflops
        if dtype is torch.float64:
            return self.single_tflops / 8
        return self.single_tflops

    @classmethod
    def from_toml(cls, path: str | Path) -> Device:
        """Reads a device from a TOML file with this class's attributes as keys.

        ``label`` and the optional rates may lack.

        Raises:
            ProblemError: the file cannot be read, is no TOML, or a key is missing, unknown or
                wrong; the file and the key are named.
        """
        where = f"device file '{path}'"
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProblemError(f"{where} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
            raise ProblemError(f"{where} is no TOML: {error}") from error
        takes = [f.name for f in fields(cls)]
        unknown = [k for k in data if k not in takes]
        missing = [k for k in takes if k not in data and k not in ("label", *_OPTIONAL)]
        for what, keys in (("unknown", unknown), ("missing", missing)):
            if keys:
                raise ProblemError(
                    f"{where}: {what} key {', '.join(map(repr, keys))}; expected {', '.join(takes)}"
                )
        if fault := _fault(data):
            raise ProblemError(f"{where}: {fault}")
        return cls(**data)

    def to_toml(self, path: str | Path) -> Path:
        """Writes the device as TOML, whole or not at all, for ``roofline:PATH``.

        Raises:
            ProblemError: the path does not end in ``.toml``, or cannot be written.
        """
        path = Path(path)
        if path.suffix != ".toml":
            raise ProblemError(f"device file '{path}' must end in '.toml', as 'roofline:' tells by")
        text = "".join(f"{key} = {_literal(value)}\n" for key, value in asdict(self).items())
        with writing(path, what="device file"):
            write_atomic(path, text)
        return path


def _fault(values: Mapping[str, Any]) -> str | None:
    """What is wrong with the values of a device, or None."""
    for key, text in (("name", values["name"]), ("label", values.get("label", ""))):
        if not isinstance(text, str) or (key == "name" and not text):
            return f"key '{key}' is {text!r}; expected text"
    for key, unit in _RATES.items():
        value = values.get(key, 0.0)
        if key in _OPTIONAL and not value:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            usable = number and math.isfinite(value) and value > 0
        except OverflowError:  # an int beyond every float
            usable = False
        if not usable:
            return f"key '{key}' is {value!r}; expected a finite number above 0, in {unit}"
    return None


def _literal(value: str | float) -> str:
    if isinstance(value, str):  # what JSON escapes, TOML reads; DEL is the one that JSON leaves
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))


DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        Device(name="a100", label="A100 SXM 80GB", half_tflops=312, single_tflops=156, memory_tbps=2.039, ranks_tbps=0.3),
        Device(name="h100", label="H100 SXM", half_tflops=989, single_tflops=495, memory_tbps=3.35, ranks_tbps=0.45),
        Device(name="h200", label="H200 SXM", half_tflops=989, single_tflops=495, memory_tbps=4.8, ranks_tbps=0.45),
        Device(name="b200", label="B200 (HGX)", half_tflops=2250, single_tflops=1125, memory_tbps=8.0, ranks_tbps=0.9),
        Device(name="epyc", label="two threads of an AMD EPYC, measured", half_tflops=0.39, single_tflops=0.183, memory_tbps=0.0273, draws_tops=0.00014, tanh_tops=0.001, pooled_tops=0.0008),
        Device(name="mi300x", label="MI300X", half_tflops=1307, single_tflops=654, memory_tbps=5.3, ranks_tbps=0.448),
    )
}  # fmt: skip

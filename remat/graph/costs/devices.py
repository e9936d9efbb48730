"""Peak rates of devices, from vendors' data sheets or from a TOML file."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from remat.errors import ProblemError
from remat.files import write_file

#: Unit of each rate in `Device`, by the suffix of the field's name.
_UNITS = {"tflops": "TFLOP/s", "tbps": "TB/s", "tops": "10¹²/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak rates of a device for dense operators, from a data sheet or measured.

    Attributes:
        name: name of the device, as in ``"roofline:NAME"``.
        label: name shown in tables; if empty, `name` is shown.
        half_tflops: peak of bfloat16 and float16 matrix products, TFLOP/s.
        single_tflops: peak of float32 matrix products (TF32 if the device has it), TFLOP/s.
        memory_tbps: memory bandwidth, TB/s.
        ranks_tbps: bandwidth from one rank to the other ranks on its machine, TB/s; if 0,
            ``memory_tbps`` is used instead.
        draws_tops: random numbers drawn, 10¹² per second; 0 means that only memory bandwidth
            limits the rate.
        tanh_tops: hyperbolic tangents computed (as in GPT-2's GELU), 10¹² per second; 0 means
            that only memory bandwidth limits the rate.
        pooled_tops: elements read by max-pooling windows, 10¹² per second, each counted once for
            each window that reads it; 0 means that only memory bandwidth limits the rate.

    Raises:
        ProblemError: the name is empty, or a rate is not a finite number above 0. The last four
            rates may also be 0.
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

    def flops_per_ps(self, dtype: torch.dtype) -> float:
        """Return the peak rate for a dtype, in operations per picosecond, which equals TFLOP/s."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.half_tflops
        if dtype.is_floating_point and dtype.itemsize == 1:
            # Tensor cores run 8-bit floats at twice the rate of 16-bit ones, on an H100 1979
            # TFLOP/s.
            return 2 * self.half_tflops
        if dtype is torch.float64:
            # The ratio of an A100: 19.5 TFLOP/s in float64, 156 in TF32.
            return self.single_tflops / 8
        return self.single_tflops

    @classmethod
    def from_toml(cls, path: str | Path) -> Device:
        """Read a device's peak rates from a TOML file whose keys are the attributes of `Device`.

        The file may lack keys of attributes with a default.

        Raises:
            ProblemError: the file cannot be read or is not TOML, or a key is missing, unknown or
                has an invalid value. The message names the file and the key.
        """
        where = f"device file '{path}'"
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProblemError(f"{where} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
            raise ProblemError(f"{where} is no TOML: {error}") from error
        takes = [f.name for f in fields(cls)]
        required = {f.name for f in fields(cls) if f.default is MISSING}
        for problem, keys in (
            ("unknown", data.keys() - takes),
            ("missing", required - data.keys()),
        ):
            if keys:
                raise ProblemError(
                    f"{where}: {problem} key {', '.join(map(repr, sorted(keys)))}; expected {', '.join(takes)}"
                )
        if fault := _fault(data):
            raise ProblemError(f"{where}: {fault}")
        return cls(**data)

    def to_toml(self, path: str | Path) -> Path:
        """Write the device to a TOML file for ``roofline:PATH`` atomically, and return the path.

        Raises:
            ProblemError: the path does not end in ``.toml``, or cannot be written.
        """
        path = Path(path)
        if path.suffix != ".toml":
            raise ProblemError(f"device file '{path}' must end in '.toml', as 'roofline:' tells by")
        text = "".join(f"{key} = {_literal(value)}\n" for key, value in asdict(self).items())
        write_file(path, text, "device file", ProblemError)
        return path


def _fault(values: Mapping[str, Any]) -> str | None:
    """Return a description of the first invalid value of a device; None if all are valid."""
    for key, text in (("name", values["name"]), ("label", values.get("label", ""))):
        if not isinstance(text, str) or (key == "name" and not text):
            return f"key '{key}' is {text!r}; expected text"
    for field in fields(Device):
        key, value = field.name, values.get(field.name, 0.0)
        unit = _UNITS.get(key.rpartition("_")[2])
        if unit is None or (field.default is not MISSING and not value):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            usable = number and math.isfinite(value) and value > 0
        except OverflowError:  # an int too large for a float
            usable = False
        if not usable:
            return f"key '{key}' is {value!r}; expected a finite number above 0, in {unit}"
    return None


def _literal(value: str | float) -> str:
    """Return a value as a TOML literal."""
    if isinstance(value, str):
        # A JSON string is a valid TOML string, except that TOML requires an escape for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))


DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        Device(name="a100", label="A100 SXM 80GB", half_tflops=312, single_tflops=156, memory_tbps=2.039, ranks_tbps=0.3),
        Device(name="h100", label="H100 SXM", half_tflops=989, single_tflops=495, memory_tbps=3.35, ranks_tbps=0.45),
        Device(name="h200", label="H200 SXM", half_tflops=989, single_tflops=495, memory_tbps=4.8, ranks_tbps=0.45),
        Device(name="gh200", label="GH200 (H100 96GB)", half_tflops=989, single_tflops=495, memory_tbps=4.0, ranks_tbps=0.45),
        Device(name="b200", label="B200 (HGX)", half_tflops=2250, single_tflops=1125, memory_tbps=8.0, ranks_tbps=0.9),
        Device(name="epyc", label="two threads of an AMD EPYC, measured", half_tflops=0.39, single_tflops=0.183, memory_tbps=0.0273, draws_tops=0.00014, tanh_tops=0.001, pooled_tops=0.0008),
        Device(name="mi300x", label="MI300X", half_tflops=1307, single_tflops=654, memory_tbps=5.3, ranks_tbps=0.448),
    )
}  # fmt: skip

"""Describe the link between a device and its host's memory, and measure the link's bandwidth."""

from __future__ import annotations

import functools
import math
import numbers
import re
from dataclasses import dataclass

import torch

from remat.errors import ProblemError
from remat.graph.costs.measure import durations_ps, this_device, undisturbed
from remat.units import parse_bytes

_PS_PER_S = 10**12
#: Bytes per second in each direction of a link, from data sheets, by name of the link.
LINKS = {
    "pcie4": 32 * 10**9,  # PCI-SIG: 16 lanes of 16 GT/s; NVIDIA A100: 64 GB/s both ways together
    "pcie5": 64 * 10**9,  # PCI-SIG: 16 lanes of 32 GT/s; NVIDIA H100: 128 GB/s both ways together
    "nvlink-c2c": 450 * 10**9,  # NVIDIA GH200: 900 GB/s both ways together
}
#: Largest valid rate in bytes per second, above that of any link.
_MOST_BYTES_PER_S = 10**18
#: A rate without a unit must be at least this number of bytes per second. A user who writes a smaller number has
#: probably forgotten the unit.
_LEAST_WITHOUT_UNIT = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between a device and its host, with two equally fast, independent directions.

    Attributes:
        bytes_per_s: bytes per second in each direction.
        name: a name from `LINKS`, or ``"measured"``; empty for a link given by its rate alone.

    Raises:
        ProblemError: the rate is not between 1 and 10¹⁸ bytes per second.
    """

    bytes_per_s: int
    name: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.bytes_per_s <= _MOST_BYTES_PER_S:
            raise ProblemError(
                f"a link has {self.bytes_per_s} bytes per second; expected 1 to {_MOST_BYTES_PER_S:g}"
            )

    @classmethod
    def parse(cls, value: object) -> Link:
        """Convert a user's value, such as ``"pcie5"`` or ``"25GB/s"``, to a link.

        Args:
            value: a `Link`, a name from `LINKS` such as ``"pcie5"``, the result of ``str(link)``,
                or bytes per second such as ``"25GB/s"`` or ``25e9``. With ``"measured"``, the link
                of this machine's CUDA device is timed.

        Raises:
            ProblemError: the value has none of these forms, or there is no device to measure.
        """
        if isinstance(value, Link):
            return value
        text = value.strip() if isinstance(value, str) else ""
        if text.lower() == "measured":
            return measured_link()
        if text.lower() in LINKS:
            return cls(name=text.lower(), bytes_per_s=LINKS[text.lower()])
        with_name = re.fullmatch(rf"({'|'.join(LINKS)}|measured) \((.+)\)", text)
        rate = _rate(with_name[2] if with_name else value)
        if 1 <= rate <= _MOST_BYTES_PER_S:
            return cls(bytes_per_s=int(rate), name=with_name[1] if with_name else "")
        raise ProblemError(
            f"offload is {value!r}; expected the link to the host: bytes per second such as '25GB/s' or 25e9, "
            f"'measured', or one of {', '.join(LINKS)}. A small b stands for bits, and a number without a unit must be "
            f"at least {_LEAST_WITHOUT_UNIT:g}"
        )

    def time_ps(self, nbytes: int) -> int:
        """Return how many picoseconds a copy of ``nbytes`` bytes takes, rounded up."""
        return -(-nbytes * _PS_PER_S // self.bytes_per_s)

    def bytes_in(self, time_ps: int) -> int:
        """Return how many bytes can be copied in one direction in ``time_ps`` picoseconds, rounded down."""
        return time_ps * self.bytes_per_s // _PS_PER_S

    def __str__(self) -> str:
        """Return the link as text that `parse` accepts: ``"25 GB/s"``, ``"pcie5 (64 GB/s)"``."""
        gigabytes, rest = divmod(self.bytes_per_s, 10**9)
        rate = f"{f'{gigabytes}.{rest:09}'.rstrip('0').rstrip('.')} GB/s"
        return f"{self.name} ({rate})" if self.name else rate


#: Link assumed if a checkpoint policy tags values for offload to the host but the user names no link.
DEFAULT_LINK = Link(name="pcie4", bytes_per_s=LINKS["pcie4"])
#: Bytes of each timed copy, and total seconds for the repeated copies in one direction.
_MEASURED_BYTES, _RUNS_S = 1 << 28, 0.2


def measured_link() -> Link:
    """Return the link of the current CUDA device, with the measured rate of the slower direction.

    Raises:
        ProblemError: the machine has no CUDA device.
    """
    device = this_device()
    if device.type == "cpu":
        raise ProblemError(
            "offload is 'measured', and this machine has no CUDA device whose link could be timed; give the rate: "
            f"'25GB/s', or one of {', '.join(LINKS)}"
        )
    rate = measured_rate(device)
    # Two significant digits, rounded down, so that equal machines plan alike.
    unit = 10 ** (len(str(rate)) - 2)
    return Link(name="measured", bytes_per_s=rate // unit * unit)


@functools.cache
def measured_rate(device: torch.device, nbytes: int = _MEASURED_BYTES) -> int:
    """Measure the bytes per second of copies between a device and page-locked host memory, in the slower direction."""
    with undisturbed(device):
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        copies = [
            functools.partial(to.copy_, of, non_blocking=True)
            for to, of in ((host, on_device), (on_device, host))
        ]
        slower = max(min(durations_ps(copy, device, seconds=_RUNS_S)) for copy in copies)
    return nbytes * _PS_PER_S // max(1, slower)


def _rate(value: object) -> float:
    """Return the bytes per second that a number or a text such as ``"25GB/s"`` states; NaN for other values."""
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        return math.nan
    # "GB" and "gb" mean bytes; a small b after a capital, as in "Gb", means bits.
    with_unit = re.fullmatch(
        r"([\d.]+\s*(?:[KMGTkmgt]?[iI]?B|[kmgt]?i?b))/[sS]", str(value).strip()
    )
    try:
        if with_unit is None:
            rate = float(value)
            return rate if rate >= _LEAST_WITHOUT_UNIT else math.nan
        nbytes = parse_bytes(with_unit[1])
    except (ValueError, OverflowError):
        return math.nan
    return math.nan if nbytes is None else nbytes

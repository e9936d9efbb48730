"""The link between a device and its host's memory: bytes per second, by name or as given."""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from remat.errors import ProblemError
from remat.units import parse_bytes

_PS_PER_S = 10**12
#: More than any link has.
_MOST_BYTES_PER_S = 10**18
#: Below this many bytes per second somebody has left out the unit.
_LEAST_WITHOUT_UNIT = 10**6
_BITS = "; a small b stands for bits: 25Gb/s are 3.125GB/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link to the host, with both directions alike and at once.

    Attributes:
        name: as it was asked for.
        bytes_per_s: bytes per second, each way.
    """

    name: str
    bytes_per_s: int

    def __post_init__(self) -> None:
        if not 1 <= self.bytes_per_s <= _MOST_BYTES_PER_S:
            raise ProblemError(
                f"link '{self.name}' has {self.bytes_per_s} bytes per second; expected from 1 to {_MOST_BYTES_PER_S:g}"
            )

    @classmethod
    def parse(cls, value: object) -> Link:
        """Reads a name of `links`, or bytes per second such as ``"25GB/s"`` or ``25e9``.

        Raises:
            ProblemError: it is neither.
        """
        if isinstance(value, Link):
            return value
        if isinstance(value, str):
            known = links().get(value.strip().lower())
            if known is not None:
                return known
        rate = _rate(value)
        if 1 <= rate < _LEAST_WITHOUT_UNIT and not _has_unit(value):
            raise ProblemError(
                f"offload is {value!r}, which is {rate:g} bytes per second; expected a rate with its unit, such as "
                f"'{rate:g}GB/s'"
            )
        if 1 <= rate <= _MOST_BYTES_PER_S:
            name = value.strip() if isinstance(value, str) else f"{int(rate)}B/s"
            return cls(name=name, bytes_per_s=int(rate))
        raise ProblemError(
            f"offload is {value!r}; expected the link to the host: bytes per second such as '25GB/s' or 25e9, or one of "
            f"{', '.join(links())}{_BITS if str(value).strip().endswith('b/s') else ''}"
        )

    @classmethod
    def of_told(cls, text: str) -> Link:
        """Reads what `told` says, as plans keep it.

        Raises:
            ProblemError: it says nothing of the kind.
        """
        match = re.fullmatch(r"(?:(\S+) \()?([0-9.]+(?:e[+-][0-9]+)?) GB/s\)?", text)
        with contextlib.suppress(
            ValueError, OverflowError
        ):  # a number that is none; a ProblemError, too
            if match is not None:
                rate = round(float(match[2]) * 1e9)
                return cls(name=match[1] or f"{match[2]}GB/s", bytes_per_s=rate)
        raise ProblemError(
            f"the link is {text!r}; expected its rate in one direction, such as '25 GB/s' or 'pcie5 (64 GB/s)'"
        )

    def time_ps(self, nbytes: int) -> int:
        """Picoseconds of a copy of so many bytes, rounded up."""
        return -(-nbytes * _PS_PER_S // self.bytes_per_s)

    def bytes_in(self, time_ps: int) -> int:
        """Bytes that go one way in a time in picoseconds."""
        return time_ps * self.bytes_per_s // _PS_PER_S

    def __str__(self) -> str:
        return self.name

    @property
    def option(self) -> str:
        """The link as text that `parse` reads."""
        try:
            known = Link.parse(self.name).bytes_per_s == self.bytes_per_s
        except ProblemError:
            known = False
        return self.name if known else f"{self.bytes_per_s}B/s"

    @property
    def told(self) -> str:
        """The link for people."""
        whole, rest = divmod(self.bytes_per_s, 10**9)
        rate = f"{f'{whole}.{rest:09}'.rstrip('0').rstrip('.')} GB/s"
        return f"{self.name} ({rate})" if self.name in links() else rate


def _has_unit(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower().endswith("b/s")


def _rate(value: object) -> float:
    """Bytes per second of a number, or of text with a unit or without; NaN where it is none."""
    try:
        if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
            return math.nan
        if not isinstance(value, str):
            return float(value)
        unit = re.search(r"([kmgt]?i?b)/s\s*$", value, re.IGNORECASE)
        if unit is None:
            return float(value)
        of_bits = unit[1] != unit[1].lower() and unit[1].endswith("b")
        nbytes = None if of_bits else parse_bytes(value[: unit.end(1)])
    except (ValueError, OverflowError):
        return math.nan
    return math.nan if nbytes is None else nbytes


@functools.cache
def links() -> Mapping[str, Link]:
    """The links that have a name: rates of data sheets, in one direction; ``links.toml`` names the sources."""
    text = resources.files(__package__).joinpath("links.toml").read_text(encoding="utf-8")
    return {
        name: Link(name=name, bytes_per_s=row["bytes_per_s"])
        for name, row in tomllib.loads(text).items()
    }

"""The link between a device and its host's memory: bytes per second, by name or as given."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from remat.errors import ProblemError
from remat.units import Budget

_PS_PER_S = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link to the host, with both directions alike and at once.

    Attributes:
        name: as it was asked for.
        bytes_per_s: bytes per second, each way.
    """

    name: str
    bytes_per_s: int

    @classmethod
    def parse(cls, value: object) -> Link:
        """Reads a name of `links`, or bytes per second such as ``"25GB/s"`` or ``25e9``.

        Raises:
            ProblemError: it is neither.
        """
        if isinstance(value, Link):
            return value
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and 1 <= value < math.inf
        ):
            value = f"{int(value)}B/s"
        if isinstance(value, str):
            known = links().get(value.strip().lower())
            if known is not None:
                return known
            rate = re.fullmatch(r"\s*([0-9.]+\s*[kmgt]?i?b)/s\s*", value, re.IGNORECASE)
            nbytes = None if rate is None else Budget.parse(rate.group(1)).nbytes
            if nbytes:
                return cls(name=value.strip(), bytes_per_s=nbytes)
        raise ProblemError(
            f"offload is {value!r}; expected the link to the host: bytes per second such as '25GB/s' or 25e9, or one of "
            f"{', '.join(links())}"
        )

    def time_ps(self, nbytes: int) -> int:
        """Picoseconds of a copy of so many bytes, rounded up."""
        return -(-nbytes * _PS_PER_S // self.bytes_per_s)

    def __str__(self) -> str:
        return self.name

    @property
    def told(self) -> str:
        """The link for people."""
        rate = f"{self.bytes_per_s / 1e9:g} GB/s"
        return f"{self.name} ({rate})" if self.name in links() else rate


@functools.cache
def links() -> Mapping[str, Link]:
    """The links that have a name: rates of data sheets, in one direction; ``links.toml`` names the sources."""
    text = resources.files(__package__).joinpath("links.toml").read_text(encoding="utf-8")
    return {
        name: Link(name=name, bytes_per_s=row["bytes_per_s"])
        for name, row in tomllib.loads(text).items()
    }

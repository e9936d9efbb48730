"""Parse budgets, and format bytes, costs and ratios as text."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

from remat.errors import BudgetError

_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{p}b": 1000**k for k, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**k for k, p in enumerate("kmgt", 1)},
}  # fmt: skip
#: Pattern of a number, then letters. 1,100 digits suffice for every float; Python refuses to parse ints of thousands of
#: digits.
_NUMBER = re.compile(r"\s*([0-9]{1,1100}(?:\.[0-9]{0,1100})?|\.[0-9]{1,1100})\s*([A-Za-z]*)\s*")
#: Units of bytes, each with its number of bytes, largest first.
_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
#: Names of time units, each with its number of picoseconds, largest first.
_PS = (("s", 10**12), ("ms", 10**9), ("µs", 10**6), ("ns", 10**3), ("ps", 1))
#: Prefixes of all other units, each with its factor, largest first.
_COUNTS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3), ("", 1))
#: Pattern of units that have a prefix already, such as pJ and kWh, so that `scales_of` adds none.
_PREFIXED = re.compile("[fpnuµmkMGT](J|s|W|Wh|Ws|g|B|FLOP|op)")
_FORMS = (
    "expected bytes of the step's peak: an int above 1, or text like '40GiB' or '512MB'; remat.Peak(0.5) or "
    "'peak:0.5' (0 is the least peak found, 1 the peak at budget 1); remat.Saved('8GiB') or 'saved:8GiB' (bytes of saved "
    "activations); or a number from 0 to 1 (ratio of the saved activations)"
)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Peak:
    """A budget on the peak of the step. The peak is the most bytes alive at one time.

    The peak includes weights. The peak is found by simulation. If Inductor compiles the step, the compiled code is
    simulated. A ratio of the peak refers to the plan at budget 1, which may save as many bytes as the runtime-optimal
    partition.

    Attributes:
        nbytes: limit on the peak in bytes; None if the budget is a ratio.
        share: limit on the peak as a ratio from 0 to 1, where 0 is the least peak found, and 1 is
            the peak of the plan at budget 1. None if the budget is in bytes.
    """

    nbytes: int | None
    share: float | None

    def __init__(self, value: float | int | str) -> None:
        """Parse a budget on the peak of the step, which is a ratio or bytes.

        Args:
            value: a number from 0 to 1 is a ratio. An int above 1, or text such as ``"40GiB"``, is
                bytes.

        Raises:
            BudgetError: ``value`` is neither a ratio nor bytes.
        """
        given: object = value
        try:
            plain = isinstance(given, numbers.Real) or (isinstance(given, str) and ":" not in given)
            read = Budget.parse(given) if plain else None
        except BudgetError:
            read = None
        if read is None:
            raise BudgetError(
                f"peak is {value!r}; expected bytes: an int above 1, or text like '40GiB' or '512MB'; or a "
                "number from 0 (the least peak found) to 1 (the peak of the plan for budget 1)"
            )
        object.__setattr__(self, "nbytes", read.peak_bytes)
        object.__setattr__(self, "share", read.share)

    def __repr__(self) -> str:
        """Return the budget as a Python expression with the exact number of bytes."""
        if self.nbytes is None:
            return f"Peak({self.share})"
        # The numbers 0 and 1 would be ratios.
        return f"Peak({self.nbytes})" if self.nbytes > 1 else f"Peak('{self.nbytes}B')"

    def __str__(self) -> str:
        """Return the budget as short text."""
        # Bytes are rounded down, so that the text, parsed as a budget, never allows more bytes.
        return str(self.share) if self.nbytes is None else _rounded_down(self.nbytes)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Saved:
    """A budget on the bytes that forward saves for backward; the peak of the step is not limited.

    Attributes:
        nbytes: most bytes that forward may save.
    """

    nbytes: int

    def __init__(self, value: int | str) -> None:
        """Parse the number of bytes that forward may save for backward.

        Args:
            value: an int, or text such as ``"8GiB"``.

        Raises:
            BudgetError: ``value`` is not a number of bytes. A ratio is given as a plain number,
                without `Saved`.
        """
        given: Any = value
        nbytes: int | None = None
        if isinstance(given, str):
            nbytes = parse_bytes(given)
        # A bool is an integral number to Python.
        elif isinstance(given, numbers.Integral) and given is not True and given is not False:
            nbytes = int(given)
        if nbytes is None or nbytes < 0:
            raise BudgetError(
                f"saved is {value!r}; expected bytes: an int, or text like '8GiB' or '512MB'. A ratio of the saved "
                "activations is written as the number itself: budget=0.5"
            )
        object.__setattr__(self, "nbytes", nbytes)

    def __repr__(self) -> str:
        """Return the budget as a Python expression with the exact number of bytes."""
        return f"Saved({self.nbytes})"

    def __str__(self) -> str:
        """Return the budget's number of bytes as short text, rounded down."""
        return _rounded_down(self.nbytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget on the peak of the step, or on the bytes that forward saves for backward.

    Exactly one attribute of the budget is set; the others are None.

    Attributes:
        share: limit on the saved bytes, as a ratio from 0 to 1 of the bytes that the
            runtime-optimal partition saves.
        nbytes: limit on the bytes saved for backward.
        peak_bytes: limit on the step's peak, in bytes.
        peak_share: limit on the peak as a ratio from 0 to 1, where 0 is the least peak found, and
            1 is the peak of the plan at budget 1.

    Raises:
        BudgetError: no attribute is set, or several are.
    """

    share: float | None = None
    nbytes: int | None = None
    peak_bytes: int | None = None
    peak_share: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise BudgetError(
                f"Budget was given {', '.join(f'{k}={v!r}' for k, v in given.items()) or 'nothing'}; expected exactly "
                f"one of {', '.join(f.name for f in fields(self))}"
            )

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Parse a budget as users write it.

        Args:
            value: a `Budget`, `Peak` or `Saved`; an int, float or text as in `remat.plan`.

        Raises:
            BudgetError: ``value`` is not a budget. The message lists all forms.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, Peak):
            return cls(peak_bytes=value.nbytes, peak_share=value.share)
        if isinstance(value, Saved):
            return cls(nbytes=value.nbytes)
        if isinstance(value, bool):  # an int to Python: True would mean budget 1
            raise BudgetError(f"budget is {value!r}; {_FORMS}")
        if isinstance(value, numbers.Integral):
            number = int(value)
            if number < 0:
                raise BudgetError(f"budget is {number}, which is negative; {_FORMS}")
            return cls(share=float(number)) if number <= 1 else cls(peak_bytes=number)
        if isinstance(value, numbers.Real):
            share = float(value)
            if math.isnan(share) or share < 0:
                raise BudgetError(f"budget is {share!r}; {_FORMS}")
            if share > 1:
                raise BudgetError(
                    f"budget is {share!r}, a ratio above 1; {_FORMS} (bytes are written as an int)"
                )
            return cls(share=share)
        if isinstance(value, str):
            return cls._parse_text(value)
        raise BudgetError(f"budget is {value!r} of type {type(value).__name__}; {_FORMS}")

    @classmethod
    def _parse_text(cls, text: str) -> Budget:
        kind, colon, rest = text.strip().partition(":")
        if colon and kind.lower() in _KINDS:
            return cls.parse(_KINDS[kind.lower()](rest))
        match = _NUMBER.fullmatch(text)
        if match is None:
            raise BudgetError(f"budget is {text!r}; {_FORMS}")
        number, unit = match.groups()
        if not unit:
            return cls.parse(int(number) if number.isdigit() else float(number))
        nbytes = parse_bytes(text)
        if nbytes is None:
            raise BudgetError(f"budget is {text!r}: '{unit}' is no unit of bytes; {_FORMS}")
        return cls(peak_bytes=nbytes)

    def capacity(self, *, full_bytes: int, least: int, why: tuple[str, str] = ("", "")) -> int:
        """Return the number of bytes that the plan of one graph may save under this budget.

        If a ratio allows fewer than ``least`` bytes, the result is ``least``, because a ratio need
        not be met exactly. Under a budget on the peak, which does not limit the saved bytes, the
        result is the larger of ``full_bytes`` and ``least``.

        Args:
            full_bytes: bytes that the runtime-optimal partition saves.
            least: the fewest bytes that any plan saves.
            why: pair of texts for the error message: why no plan saves fewer than ``least`` bytes,
                and how to lower ``least``. Empty texts if unknown.

        Raises:
            BudgetError: the budget is in bytes and below ``least``. The message names ``least``.
        """
        if self.on_peak:
            return max(full_bytes, least)
        nbytes = self._saved_bytes(full_bytes)
        if self.nbytes is not None and nbytes < least:
            raise BudgetError(
                f"budget is {format_bytes(nbytes)} ({nbytes} bytes), but this graph must save "
                f"at least {least} bytes ({format_bytes(least)})"
                + (f", because {why[0]}" if why[0] else "")
                + "; raise the budget to that"
                + (f", or {why[1]}" if why[1] else "")
            )
        return max(least, nbytes)

    def below(self, *, full_bytes: int, least: int) -> bool:
        """Return whether the budget allows fewer saved bytes than ``least``.

        Args:
            full_bytes: bytes that the runtime-optimal partition saves.
            least: the fewest bytes that any plan saves.
        """
        return not self.on_peak and self._saved_bytes(full_bytes) < least

    def _saved_bytes(self, full_bytes: int) -> int:
        """Return the bytes that a budget on saved bytes allows, where a ratio is relative to ``full_bytes``."""
        return bytes_of_share(self.share or 0.0, full_bytes) if self.nbytes is None else self.nbytes

    @property
    def on_peak(self) -> bool:
        """Whether the budget bounds the step's peak, in bytes or as a ratio."""
        return self.peak_bytes is not None or self.peak_share is not None

    @property
    def in_bytes(self) -> bool:
        """Whether the budget is a number of bytes, not a ratio."""
        return self.nbytes is not None or self.peak_bytes is not None

    @property
    def label(self) -> str:
        """The budget as text for human readers; bytes are rounded."""
        if self.on_peak:
            return f"peak {_format_ratio(self.peak_share) or format_bytes(self.peak_bytes or 0)}"
        return _format_ratio(self.share) or f"{format_bytes(self.nbytes or 0)} saved"

    def __str__(self) -> str:
        """Return the budget as exact text, which `parse` turns back into an equal budget."""
        if self.on_peak:
            return f"peak:{_format_ratio(self.peak_share) or f'{self.peak_bytes}B'}"
        return _format_ratio(self.share) or f"saved:{self.nbytes}B"


#: Types that `Budget.parse` accepts.
AnyBudget = float | int | str | Budget | Peak | Saved
#: Dict from the prefix of a budget's text, as in ``peak:0.5`` or ``saved:8GiB``, to the class of the budget.
_KINDS: dict[str, Callable[[str], Peak | Saved]] = {"peak": Peak, "saved": Saved}


def parse_bytes(text: str) -> int | None:
    """Parse text such as ``"8GiB"`` or ``"8192"`` into bytes, rounded down; None if the text is no number of bytes."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    number, unit = match.groups()
    scale = _UNITS.get(unit.lower() or "b")
    if scale is None or (not unit and not number.isdigit()):  # without a unit, "0.5" is a ratio
        return None
    # Computed in integers, since a float is exact only up to 2**53.
    integer, _, fraction = number.partition(".")
    digits: int = 10 ** len(fraction)
    return int(integer or 0) * scale + int(fraction or 0) * scale // digits


def _format_ratio(ratio: float | None) -> str:
    """Format a ratio in decimal digits without an exponent; empty for None."""
    # ``repr`` has the fewest digits that identify the float; Decimal(ratio) would show its binary value.
    return "" if ratio is None else format(Decimal(repr(ratio)).normalize(), "f")


def bytes_of_share(share: float, full_bytes: int) -> int:
    """Return the most bytes ``b`` whose float quotient ``b / full_bytes`` is at most the ratio ``share``.

    Float rounding of ``share`` therefore loses no byte: 0.3 of 10 bytes is 3 bytes, for example. The result never
    falls as ``share`` rises.
    """
    if full_bytes == 0:
        return 0
    # The largest real quotient that rounds to ``share`` lies half way between ``share`` and the next float.
    next_half = Fraction(share) + Fraction(math.ulp(share)) / 2
    most = min(full_bytes, int(next_half * full_bytes))
    return most if most / full_bytes <= share else most - 1


def _byte_unit(n: float) -> tuple[str, int]:
    """Return the largest unit of at most ``n`` bytes, with its number of bytes."""
    return next((unit, size) for unit, size in _BYTES if abs(n) >= size or size == 1)


def format_bytes(n: float) -> str:
    """Format a number of bytes with up to four significant digits and a binary unit, such as ``1.5 GiB``."""
    unit, scale = _byte_unit(n)
    size = n / scale
    # Three digits would show 1000 and above as 1e+03.
    digits = ".4g" if unit == "TiB" else ".0f" if unit == "B" or abs(size) >= 999.5 else ".3g"
    return f"{size:{digits}} {unit}"


def _rounded_down(nbytes: int) -> str:
    """Format bytes as text that `parse_bytes` reads, such as ``1.49GiB``, rounded down to three digits."""
    unit, size = _byte_unit(nbytes)
    digits = max(0, 3 - len(str(nbytes // size)))
    return f"{nbytes * 10**digits // size / 10**digits:g}{unit}"


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Format two byte counts with enough digits that different counts get different texts."""
    texts = format_bytes(first), format_bytes(second)
    if first == second or texts[0] != texts[1]:
        return texts
    unit, size = _byte_unit(first)
    for digits in range(4, 20):
        numbers = f"{first / size:.{digits}g}", f"{second / size:.{digits}g}"
        if numbers[0] != numbers[1]:
            return f"{numbers[0]} {unit}", f"{numbers[1]} {unit}"
    return f"{first} B", f"{second} B"


def counted(n: int, noun: str) -> str:
    """Return a number followed by a noun, which ends in a plural "s" unless the number is 1."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_cost(cost: float, unit: str) -> str:
    """Format a cost with four digits and a unit prefix; picoseconds become s, ms, µs or ns."""
    for name, scale in scales_of(unit)[:-1]:
        if cost >= scale:
            return f"{cost / scale:.4g} {name}"
    return f"{cost:,.0f} {unit}"


def scales_of(unit: str) -> tuple[tuple[str, int], ...]:
    """Return a unit and its multiples as pairs (name, number of units), largest first, such as ``("TB", 10**12)``."""
    if unit == "ps":
        return _PS
    # A unit with a prefix, such as pJ, has no multiples, since MpJ is not a unit.
    if _PREFIXED.fullmatch(unit):
        return ((unit, 1),)
    return tuple((f"{prefix}{unit}", size) for prefix, size in _COUNTS)


def format_share(share: float | None) -> str:
    """Format a ratio in percent; a dash for None."""
    if share is None:
        return "–"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def format_change(share: float | None) -> str:
    """Format a relative change in percent with its sign, such as "+4.1%"; a dash for None."""
    return "–" if share is None else f"{share:+.1%}"


def some_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first ``most`` texts; if there are N further texts, append "and N more"."""
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Format rows of cells as lines of aligned columns, two blanks apart; a column without any text is left out.

    Args:
        rows: the header row, then the other rows. In a row with fewer cells than the header, the
            last cell extends over the remaining columns.
        left: indices of left-aligned columns; all others are right-aligned.
    """
    complete = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*complete, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=False))
            if width
        ]
        if len(row) < len(widths):
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines

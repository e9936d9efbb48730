"""Budgets as people write them, and bytes, costs and shares as they read them."""

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
#: As many digits as the smallest float has; Python refuses to read thousands.
_NUMBER = re.compile(r"\s*([0-9]{1,1100}(?:\.[0-9]{0,1100})?|\.[0-9]{1,1100})\s*([A-Za-z]*)\s*")
_PS = (("s", 10**12), ("ms", 10**9), ("µs", 10**6), ("ns", 10**3), ("ps", 1))
_COUNTS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3), ("", 1))
#: Units that carry a prefix of their own.
_PREFIXED = re.compile("[fpnuµmkMGT](J|s|W|Wh|Ws|g|B|FLOP|op)")
_FORMS = (
    "expected bytes of the step's peak: an int above 1, or text like '40GiB' or '512MB'; remat.Peak(0.5) or "
    "'peak:0.5' (0 is the least peak found, 1 that of budget 1); remat.Saved('8GiB') or 'saved:8GiB' (bytes of saved "
    "activations); or a number from 0 to 1 (ratio of the saved activations)"
)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Peak:
    """A budget on the peak of the step: all bytes alive at once, weights included.

    The peak is the simulated one. If Inductor compiles the step, it is that of the compiled code.

    Attributes:
        nbytes: bytes; None for a ratio.
        share: ratio from 0, the least peak found, to 1, the peak of budget 1's plan; None for bytes.
    """

    nbytes: int | None
    share: float | None

    def __init__(self, value: float | int | str) -> None:
        """Read a budget on the peak: a number from 0 to 1 is a ratio, anything else bytes such as ``"40GiB"``.

        Raises:
            BudgetError: it is neither.
        """
        given: object = value
        try:
            plain = isinstance(given, numbers.Real) or (isinstance(given, str) and ":" not in given)
            read = Budget.parse(given) if plain else None
        except BudgetError:
            read = None
        if read is None or read.nbytes is not None:
            raise BudgetError(
                f"peak is {value!r}; expected bytes: an int above 1, or text like '40GiB' or '512MB'; or a "
                "number from 0 (the least peak found) to 1 (the peak of budget 1's plan)"
            )
        object.__setattr__(self, "nbytes", read.peak_bytes)
        object.__setattr__(
            self, "share", read.share if read.peak_share is None else read.peak_share
        )

    def __repr__(self) -> str:
        """Return the budget as code, to the byte."""
        if self.nbytes is None:
            return f"Peak({self.share})"
        # The numbers 0 and 1 would be ratios.
        return f"Peak({self.nbytes})" if self.nbytes > 1 else f"Peak('{self.nbytes}B')"

    def __str__(self) -> str:
        """Return the budget for people. Bytes are rounded down, so that the text never allows more."""
        return str(self.share) if self.nbytes is None else _rounded_down(self.nbytes)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Saved:
    """A budget on the bytes that forward saves for backward, whatever the peak of the step.

    Attributes:
        nbytes: bytes.
    """

    nbytes: int

    def __init__(self, value: int | str) -> None:
        """Read a number of bytes, such as ``"8GiB"``.

        Raises:
            BudgetError: it is none; a ratio is written as the number itself.
        """
        given: Any = value
        nbytes: int | None = None
        if isinstance(given, str):
            nbytes = parse_bytes(given)
        elif isinstance(given, numbers.Integral) and given is not True and given is not False:
            nbytes = int(given)
        if nbytes is None or nbytes < 0:
            raise BudgetError(
                f"saved is {value!r}; expected bytes: an int, or text like '8GiB' or '512MB'. A ratio of the saved "
                "activations is written as the number itself: budget=0.5"
            )
        object.__setattr__(self, "nbytes", nbytes)

    def __repr__(self) -> str:
        """Return the budget as code, to the byte."""
        return f"Saved({self.nbytes})"

    def __str__(self) -> str:
        """Return the bytes for people, rounded down."""
        return _rounded_down(self.nbytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget on the peak of the step, or on the bytes that forward saves for backward; exactly one is set.

    Attributes:
        share: ratio of the bytes that the runtime-optimal partition saves, 0 to 1.
        nbytes: bytes saved.
        peak_bytes: bytes of the step's peak.
        peak_share: ratio from 0, the least peak found, to 1, the peak of budget 1's plan.

    Raises:
        BudgetError: none of them is set, or several are.
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
        """Read a budget as users write it.

        Raises:
            BudgetError: the value is no budget; the message names all forms.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, Peak):
            return cls(peak_bytes=value.nbytes, peak_share=value.share)
        if isinstance(value, Saved):
            return cls(nbytes=value.nbytes)
        if isinstance(value, bool):
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

    def capacity(self, *, full: int, least: int, why: tuple[str, str] = ("", "")) -> int:
        """The budget in bytes for one graph; a budget on the peak limits none of them.

        A share of less than ``least`` is raised to it: it asks for little, not for a number.

        Args:
            full: bytes that the runtime-optimal partition saves.
            least: the least that any plan saves.
            why: why that is the least, and what would lower it, where that is known.

        Raises:
            BudgetError: a byte budget below ``least``, which the message names.
        """
        if self.on_peak:
            return max(full, least)
        if self.nbytes is None:
            return max(least, bytes_of_share(self.share or 0.0, full))
        if self.nbytes < least:
            raise BudgetError(
                f"budget is {format_bytes(self.nbytes)} ({self.nbytes} bytes), but this graph must save "
                f"at least {least} bytes ({format_bytes(least)})"
                + (f", because {why[0]}" if why[0] else "")
                + "; raise the budget to that"
                + (f", or {why[1]}" if why[1] else "")
            )
        return self.nbytes

    def below(self, *, full: int, least: int) -> bool:
        """Whether the budget asks for less than ``least``, the least that any plan saves."""
        if self.on_peak:
            return False
        asked = bytes_of_share(self.share or 0.0, full) if self.nbytes is None else self.nbytes
        return asked < least

    @property
    def on_peak(self) -> bool:
        """Whether it is one on the step's peak."""
        return self.peak_bytes is not None or self.peak_share is not None

    @property
    def label(self) -> str:
        """The budget as text; it may be rounded."""
        if self.on_peak:
            return f"peak {_format_ratio(self.peak_share) or format_bytes(self.peak_bytes or 0)}"
        return _format_ratio(self.share) or f"{format_bytes(self.nbytes or 0)} saved"

    def __str__(self) -> str:
        """The budget as `parse` reads it, exactly."""
        if self.on_peak:
            return f"peak:{_format_ratio(self.peak_share) or f'{self.peak_bytes}B'}"
        return _format_ratio(self.share) or f"saved:{self.nbytes}B"


#: A budget as users give it.
AnyBudget = float | int | str | Budget | Peak | Saved
#: What text before a colon says of the budget behind it.
_KINDS: dict[str, Callable[[str], Peak | Saved]] = {"peak": Peak, "saved": Saved}


def parse_bytes(text: str) -> int | None:
    """Bytes of text such as ``"8GiB"`` or ``"8192"``, rounded down; None if it is no number of bytes."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    number, unit = match.groups()
    scale = _UNITS.get(unit.lower() or "b")
    if scale is None or (not unit and not number.isdigit()):
        return None
    whole, _, fraction = number.partition(".")
    digits: int = 10 ** len(fraction)
    return int(whole or 0) * scale + int(fraction or 0) * scale // digits


def _format_ratio(ratio: float | None) -> str:
    """A ratio in decimal digits, without an exponent; empty without one."""
    return "" if ratio is None else format(Decimal(repr(ratio)).normalize(), "f")


def bytes_of_share(share: float, full: int) -> int:
    """The most bytes that are no larger a share of ``full``, as floats divide.

    So ``k / n`` of n equal tensors is k tensors, and 0.3 of 10 bytes is 3, although most such floats
    lie a little below the number that is meant. It rises with the share.

    Args:
        share: from 0 to 1.
        full: what it is a share of, in bytes; below 2**53 no byte is added by rounding.
    """
    if full == 0:
        return 0
    # A quotient rounds to ``share`` at most half the way to the next float above it.
    next_half = Fraction(share) + Fraction(math.ulp(share)) / 2
    most = min(full, int(next_half * full))
    return most if most / full <= share else most - 1


def format_bytes(n: float) -> str:
    """Format bytes with three digits and a binary unit."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return (
                f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 999.5 else f"{size:.3g} {unit}"
            )
        size /= 1024
    return f"{size:.4g} TiB"


def _rounded_down(nbytes: int) -> str:
    """Format bytes as `parse_bytes` reads them, three digits of the largest unit, never more than there are."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            digits = max(0, 3 - len(str(nbytes // size)))
            return f"{nbytes * 10**digits // size / 10**digits:g}{unit}"
    return f"{nbytes}B"


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Format two byte counts with enough digits to tell them apart."""
    texts = format_bytes(first), format_bytes(second)
    if first == second or texts[0] != texts[1]:
        return texts
    unit = texts[0].split()[1]
    size = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    for digits in range(4, 20):
        numbers = f"{first / size:.{digits}g}", f"{second / size:.{digits}g}"
        if numbers[0] != numbers[1]:
            return f"{numbers[0]} {unit}", f"{numbers[1]} {unit}"
    return f"{first} B", f"{second} B"


def format_cost(cost: float, unit: str) -> str:
    """A cost for people; picoseconds as seconds or parts of them."""
    return _scaled(cost, tuple((name, float(size)) for name, size in scales_of(unit)[:-1]), unit)


def scales_of(unit: str) -> tuple[tuple[str, int], ...]:
    """The names of a unit's multiples, with how many units each is, the largest first, itself last.

    A unit that has a prefix already, as pJ does, gets no second one: there is no MpJ.
    """
    if unit == "ps":
        return _PS
    if _PREFIXED.fullmatch(unit):
        return ((unit, 1),)
    return tuple((f"{prefix}{unit}", size) for prefix, size in _COUNTS)


def _scaled(number: float, units: tuple[tuple[str, float], ...], unit: str) -> str:
    """Four digits, and the largest unit that a number reaches; all digits in the unit itself."""
    for name, scale in units:
        if number >= scale:
            return f"{number / scale:.4g} {name}"
    return f"{number:,.0f} {unit}"


def format_share(share: float | None) -> str:
    """Format a ratio in percent; a dash for None."""
    if share is None:
        return "–"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def format_change(share: float | None) -> str:
    """What is added to something, as a share of it, for people: "+4.1%"; a dash where it is not known."""
    return "–" if share is None else f"{share:+.1%}"


def some_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Texts in a row; beyond a number of them, how many more there are."""
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Cells as lines of text in columns, two blanks apart; a column without text is left out.

    Args:
        rows: the head, and the others. The last cell of a shorter row runs over the columns that it lacks.
        left: columns whose cells stand to the left; the others stand to the right.
    """
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
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

"""Budgets as users write them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.errors import BudgetError
from remat.units import (
    Budget,
    Peak,
    Saved,
    format_apart,
    format_bytes,
    format_cost,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (0, Budget(share=0.0)),
        (1, Budget(share=1.0)),
        (0.3, Budget(share=0.3)),
        (np.float32(0.5), Budget(share=0.5)),
        ("0.25", Budget(share=0.25)),
        ("1", Budget(share=1.0)),
        (2, Budget(peak_bytes=2)),
        (np.int64(4096), Budget(peak_bytes=4096)),
        ("4096", Budget(peak_bytes=4096)),
        ("8 gib", Budget(peak_bytes=8 * 2**30)),
        (" 512MB ", Budget(peak_bytes=512 * 10**6)),
        (".5kB", Budget(peak_bytes=500)),
        ("0.1TiB", Budget(peak_bytes=2**40 // 10)),
        ("1B", Budget(peak_bytes=1)),
        ("PEAK: 1.5 KiB", Budget(peak_bytes=1536)),
        ("peak:4096", Budget(peak_bytes=4096)),
        (Peak(10**9), Budget(peak_bytes=10**9)),
        (Peak("0B"), Budget(peak_bytes=0)),
        (Peak("40GiB"), Budget(peak_bytes=40 * 2**30)),
        (Peak(0.5), Budget(peak_share=0.5)),
        (Peak(0), Budget(peak_share=0.0)),
        ("Peak: 1", Budget(peak_share=1.0)),
        ("saved:1GiB", Budget(nbytes=2**30)),
        ("Saved: 1.5 KiB", Budget(nbytes=1536)),
        (Saved(0), Budget(nbytes=0)),
        (Saved(1), Budget(nbytes=1)),
        (Saved(np.int64(4096)), Budget(nbytes=4096)),
        (Saved("512MB"), Budget(nbytes=512 * 10**6)),
    ],
)
def test_what_can_be_read(written: Any, read: Budget) -> None:
    assert Budget.parse(written) == read
    assert Budget.parse(read) == read


def test_a_share_of_the_peak_is_no_bound_on_what_is_saved() -> None:
    read = Budget(peak_share=0.5)
    assert read.on_peak
    assert read.capacity(full_bytes=10, least=3) == 10
    assert not read.below(full_bytes=10, least=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (math.nan, "nan"),
        (math.inf, "a ratio above 1"),
        (-0.5, "-0.5"),
        (-3, "-3, which is negative"),
        (1.5, "bytes are written as an int"),
        (True, "True"),
        (None, "NoneType"),
        ([0.5], "list"),
        ("8 bananas", "'bananas' is no unit of bytes"),
        ("", "''"),
        ("GiB", "'GiB'"),
        ("-1GiB", "'-1GiB'"),
        ("1e9", "'1e9'"),
        ("nan", "'nan'"),
        ("1.5", "a ratio above 1"),
        ("1" * 5000, "1111"),
        ("top:1GiB", "'top:1GiB'"),
    ],
)
def test_what_cannot_be_meant(text: Any, message: str) -> None:
    with pytest.raises(BudgetError) as caught:
        Budget.parse(text)
    assert message in str(caught.value)
    assert "8GiB" in str(caught.value), "the message says what can be written instead"


@pytest.mark.parametrize(
    "text",
    ["saved:", "saved:0.5", "saved:peak:1GiB", "peak:", "peak:1.5", "peak:-1", "peak:peak:1GiB"],
)
def test_nothing_else_may_stand_behind_a_measure(text: str) -> None:
    with pytest.raises(BudgetError):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("measure", "says", "values"),
    [
        (Peak, "an int above 1, or text like '40GiB'", [-1, "peak:0.5", Peak(0.5), 1.5, "1.5"]),
        (Saved, "an int, or text like '8GiB'", [-1, "saved:1GiB", 0.5, "0.5", "1 GiB/s"]),
    ],
)
def test_bytes_that_cannot_be_meant(measure: Any, says: str, values: list[Any]) -> None:
    for value in [*values, "", "8 bananas", None, True, [1]]:
        with pytest.raises(BudgetError, match=f"expected bytes: {says}"):
            measure(value)


@given(share=st.floats(0, 1), full_bytes=st.integers(0, 2**45), least=st.integers(0, 2**40))
def test_a_share_is_never_exceeded_and_never_below_the_least(
    share: float, full_bytes: int, least: int
) -> None:
    capacity = Budget.parse(share).capacity(full_bytes=full_bytes, least=least)
    assert capacity >= least
    assert capacity == least or capacity / full_bytes <= share
    assert full_bytes == 0 or capacity >= full_bytes or (capacity + 1) / full_bytes > share, (
        "not a byte is lost"
    )
    assert capacity >= int(Fraction(repr(share)) * full_bytes), (
        "nor of the decimal as it is written"
    )
    assert Budget.parse(1.0).capacity(full_bytes=full_bytes, least=least) == max(full_bytes, least)
    assert Budget.parse(0.0).capacity(full_bytes=full_bytes, least=least) == least


@given(st.integers(0, 2**45), st.integers(1, 2**45), st.integers(1, 2**7))
def test_the_share_of_any_bytes_is_those_bytes(part: int, whole: int, times: int) -> None:
    part %= whole + 1
    capacity = Budget.parse(part / whole).capacity(full_bytes=whole * times, least=0)
    assert capacity == part * times


@given(a=st.floats(0, 1), b=st.floats(0, 1), full_bytes=st.integers(0, 2**62))
def test_a_larger_share_is_no_fewer_bytes(a: float, b: float, full_bytes: int) -> None:
    small, large = (
        Budget.parse(x).capacity(full_bytes=full_bytes, least=0) for x in sorted((a, b))
    )
    assert small <= large <= full_bytes
    following = Budget.parse(min(1.0, math.nextafter(a, 2))).capacity(
        full_bytes=full_bytes, least=0
    )
    assert Budget.parse(a).capacity(full_bytes=full_bytes, least=0) <= following


@given(st.integers(2, 2**50), st.integers(0, 2**50))
def test_saved_bytes_below_the_least_are_refused_by_naming_it(nbytes: int, least: int) -> None:
    budget = Budget.parse(Saved(nbytes))
    if nbytes >= least:
        assert budget.capacity(full_bytes=0, least=least) == nbytes
    else:
        with pytest.raises(BudgetError, match=f"at least {least} bytes"):
            budget.capacity(full_bytes=2**60, least=least)


@given(
    st.one_of(
        st.floats(0, 1),
        st.integers(2, 2**60),
        st.integers(0, 2**60).map(Saved),
        st.floats(0, 1).map(Peak),
    )
)
def test_what_is_printed_reads_back(value: Any) -> None:
    budget = Budget.parse(value)
    assert Budget.parse(str(budget)) == budget


def test_bytes_for_people() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 999 * 2**10: "999 KiB"}
    texts |= {1023 * 2**10: "1023 KiB", -1000 * 2**20: "-1000 MiB", 2**30: "1 GiB"}
    assert {n: format_bytes(n) for n in texts} == texts


@given(st.integers(0, 2**50).map(lambda n: Peak(f"{n}B")) | st.floats(0, 1).map(Peak))
def test_a_peak_is_shown_to_the_byte_as_code_and_rounded_down_for_people(peak: Peak) -> None:
    assert eval(repr(peak), {"Peak": Peak}) == peak
    if peak.nbytes is not None:
        shown = parse_bytes(str(peak))
        assert shown is not None
        assert peak.nbytes * 0.98 < shown + 1 <= peak.nbytes + 1


def test_a_peak_is_short_for_people() -> None:
    assert (str(Peak(184_813_060)), str(Peak(0.3))) == ("176MiB", "0.3")
    assert (repr(Saved("1KiB")), str(Saved(2**31 - 1))) == ("Saved(1024)", "1.99GiB")


@pytest.mark.parametrize("given", [{}, {"share": 0.5, "nbytes": 8}, {"nbytes": 8, "peak_bytes": 8}])
def test_a_budget_has_exactly_one_measure(given: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match="expected exactly one of share, nbytes"):
        Budget(**given)


def test_budgets_for_people() -> None:
    labels = {
        0.25: "0.25",
        1500: "peak 1.46 KiB",
        "saved:8GiB": "8 GiB saved",
        "peak:.5": "peak 0.5",
    }
    assert {written: Budget.parse(written).label for written in labels} == labels


def test_a_unit_with_a_prefix_gets_no_second_one() -> None:
    texts = {"pJ": "5,000,000 pJ", "J": "5 MJ", "ps": "5 µs", "FLOP": "5 MFLOP"}
    assert {unit: format_cost(5_000_000, unit) for unit in texts} == texts
    assert format_cost(12, "mWh") == "12 mWh"


def test_two_numbers_of_bytes_are_told_apart() -> None:
    assert format_apart(5 << 30, 4 << 30) == ("5 GiB", "4 GiB")
    assert format_apart((5 << 30) + 1024, 5 << 30) == ("5.000001 GiB", "5 GiB")
    assert format_apart(3 << 20, 3 << 20) == ("3 MiB", "3 MiB")

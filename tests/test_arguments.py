"""Keywords that a function passes on: shown in its signature and docstring, and checked by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import remat
from remat.arguments import documented, passes_on


def paint(*, colour: str = "red", coats: int = 1) -> str:
    """Paint.

    Args:
        colour: the colour, by name; it may be
            long: or short.
        coats: number of coats.
    """
    return f"{colour} {coats}"


@passes_on(["colour"], paint)
def build(rooms: int, **options: Any) -> str:
    """Build.

    Args:
        rooms: number of rooms.
        options: how to paint.

    Returns:
        The house.
    """
    return f"{rooms} {paint(**options)}"


def test_documentation_is_read_by_name() -> None:
    assert documented(paint) == {
        "colour": "    colour: the colour, by name; it may be\n        long: or short.",
        "coats": "    coats: number of coats.",
    }


def test_signature_and_docstring_show_what_is_passed_on() -> None:
    assert build(2, colour="blue") == "2 blue 1"
    assert str(inspect.signature(build)) == "(rooms: 'int', *, colour: 'str' = 'red') -> 'str'"
    assert (
        "        options: how to paint.\n        colour: the colour, by name; it may be\n            long: or short.\n\n"
    ) in inspect.cleandoc(build.__doc__ or "").replace("\n    ", "\n        ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"color": "red"}, "'color'; did you mean 'colour'"),
        ({"coats": 2}, "expected one of rooms, colour"),
    ],
)
def test_other_names_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        build(2, **given)


def test_others_may_be_left_to_the_function() -> None:
    @passes_on(["colour"], paint, others=True)
    def open_to_others(**options: Any) -> set[str]:
        return set(options)

    assert open_to_others(size=1) == {"size"}
    assert "**options" in str(inspect.signature(open_to_others))


def test_an_entry_point_names_the_nearest_option() -> None:
    with pytest.raises(TypeError, match=r"plan\(\) got .*'budgt'; did you mean 'budget'"):
        remat.plan(None, budgt=1)  # type: ignore[call-overload]
    with pytest.raises(
        TypeError, match=r"frontier\(\) got .*'hooks'; expected one of joint, solver"
    ):
        remat.frontier(None, hooks="bf16")  # type: ignore[arg-type,call-arg]

"""Instruments: what watches a pipeline run without being part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat.passes.base import Pass, PassResult, State
    from remat.passes.manager import PassManager


class Instrument:
    """Base of instruments: override what you want to see.

    A manager calls every instrument at every pass, outer passes before those inside them; ``after``
    and ``failed`` come in reverse order, so that instruments nest like context managers. ``path``
    names the pass with those that it is inside of, outermost first.
    """

    def start(self, manager: PassManager, state: State) -> None:
        """A pipeline begins; ``state`` is what it works on."""

    def should_run(self, p: Pass, state: State, path: tuple[str, ...]) -> bool:
        """Whether the pass is run at all; one instrument that says no is enough."""
        return True

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        """A pass is about to run."""

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        """A pass has run."""

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        """A pass has raised, or did not return what it must."""

    def finish(self, result: PassResult | None) -> None:
        """A pipeline has ended; with None it has failed."""

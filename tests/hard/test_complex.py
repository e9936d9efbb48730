"""Complex numbers: several views of one storage, as real and as complex, are saved for backward."""

from __future__ import annotations

import pytest
import torch

from tests.complex_programs import PROGRAMS, Program, gradients
from tests.hard.steps import compiled

#: One program for each kind of view; the benchmark ``complex-numbers`` has all programs.
NAMES = ("scaled_and_viewed", "hermitian", "many_views", "written_whole", "spectral_layer")


def check(program: Program, budget: float, lower: str) -> None:
    found = gradients(compiled(program, budget=budget, lower=lower))
    for mine, expected in zip(found, gradients(program), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_eager(name: str) -> None:
    for budget in (0, 1):
        torch._dynamo.reset()
        check(PROGRAMS[name], budget, "eager")


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_kernels_do_not_overwrite_another_view() -> None:
    """Plain Inductor overwrites a saved view whose memory another saved view shares."""
    check(PROGRAMS["scaled_and_viewed"], 1, "inductor")

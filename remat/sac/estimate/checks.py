"""What the estimator refuses: models that are not fake, and modules that run differently each time."""

from __future__ import annotations

from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import is_fake

from remat.errors import ProblemError
from remat.sac.estimate.stats import SACStats


def difference(before: SACStats, after: SACStats) -> str | None:
    """Where two calls of a module part: "runs … as operator 3 instead of …, which"."""
    for i, (a, b) in enumerate(zip(before.func_names, after.func_names, strict=False)):
        if a != b:
            return f"runs {b} as operator {i} instead of {a}, which"
    if len(before) != len(after):
        return f"runs {len(after)} operators instead of {len(before)}, which"
    return None


def check_fake(name: str, module: nn.Module) -> None:
    """Refuses real parameters: they were made outside of the fake mode."""
    mode = active_fake_mode()
    if mode is None or mode.allow_non_fake_inputs:
        return
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_fake(tensor):
            raise ProblemError(
                f"module '{name}': '{path}' is a real tensor, not a fake one; make the model inside "
                "of the FakeTensorMode, or use FakeTensorMode(allow_non_fake_inputs=True)"
            )

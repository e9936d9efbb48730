"""Models of the zoo with values offloaded: nothing that a step leaves behind changes by a bit."""

from __future__ import annotations

import pytest
import torch

import remat
from tests.models import ZOO, Outcome, build

pytestmark = pytest.mark.slow

#: A link so fast that small models gain by it.
LINK = {"offload": "2000GB/s", "cost": "roofline:h100"}


#: All but two encoders, which differ from GPT-2 in nothing that offloading looks at.
NAMES = [name for name in ZOO if name not in ("bert", "vit")]


@pytest.mark.parametrize("name", NAMES)
def test_offloading_changes_nothing(name: str) -> None:
    step = build(name)
    joint = remat.capture(step.model, step.args, step.kwargs, lower="eager")
    full = remat.plan(joint, 1.0, cost=LINK["cost"])
    wanted = trained(name, full)
    offloaded = 0
    for share in (0.5, 0.0):
        plan = remat.plan(joint, remat.Peak(share), **LINK)  # type: ignore[arg-type]
        offloaded += plan.host_bytes
        assert trained(name, plan).differs_from(wanted) == []
    # The peak of that one is where nothing is alive that a product has not just made.
    assert offloaded > 0 or name == "checkpointed"


def trained(name: str, plan: remat.Plan) -> Outcome:
    """What a step under a plan leaves behind."""
    torch.compiler.reset()
    step = build(name)
    options = {"plan": plan, "lower": "eager"}
    return step.train(torch.compile(step.model, backend="remat", options=options))

"""The corpus in benchmarks/instances, and the models that it is captured from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import remat
from remat.solvers.graph.problem import GraphProblem, conflict, evaluate
from tests.architectures import ARCHITECTURES, Call, DenseNet, RandomSkips, UNet

FOLDER = Path(__file__).parent.parent / "benchmarks" / "instances"
FILES = sorted(FOLDER.glob("*.json"))


def test_there_is_an_instance_of_every_architecture() -> None:
    graphs = {path.stem for path in FILES if not path.stem.startswith("knapsack_")}
    assert graphs == set(ARCHITECTURES)
    assert len(graphs) >= 12
    sizes = [path.stat().st_size for path in FILES]
    assert max(sizes) < 500_000
    assert sum(sizes) < 6_000_000


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_an_instance_is_whole_and_can_be_solved(path: Path) -> None:
    made = remat.load_instance(path)
    assert path.name in (f"{made.name}.json", f"knapsack_{made.name}.json")
    assert made.to_json() == path.read_text(encoding="utf-8")
    assert (made.cost, made.unit) == ("roofline:h100", "ps")
    problem = made.problem
    if not isinstance(problem, GraphProblem):
        assert 0 < problem.capacity < problem.total_weight
        return
    assert conflict(problem) is None
    everything = evaluate(problem, [i for i in range(len(problem)) if problem.savable[i]])
    assert everything.saved_bytes >= (made.full_bytes or 0)
    assert everything.saved_bytes > 2**30  # real sizes
    assert (made.least_bytes or 0) * 1000 < (made.full_bytes or 0)
    assert len(set(problem.names)) == len(problem)


IMAGES = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
LATENTS = torch.zeros(2, 4, 8, 8)
NOISY = LATENTS, torch.zeros(2, 32), torch.zeros(2, 5, 8), LATENTS
#: The models that are ours, with few and narrow layers.
SMALL: dict[str, Callable[[], Call]] = {
    "random-skips": lambda: (RandomSkips(layers=9, width=16), (torch.zeros(4, 16),), {}),
    "densenet": lambda: (DenseNet(growth=4, layers=(1, 2)), IMAGES, {}),
    "unet": lambda: (
        UNet(base=32, context=8, blocks=1, factors=(1, 2), attentions=(1, 0)),
        NOISY,
        {},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_our_own_models_train(name: str) -> None:
    model, args, kwargs = SMALL[name]()
    loss = model.train()(*args, **kwargs)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None for p in model.parameters())
    assert remat.instance(remat.capture(model, args, kwargs, lower="eager")).full_bytes

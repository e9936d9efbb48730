"""Which kernels of backward are one: nothing that was to run late runs early for it.

What a step takes by that, `tests.upstream.test_faults` measures.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import fx

from remat.integrations.near_fusions import NearFusions
from remat.integrations.workarounds import near_fusions
from remat.torch_compat import (
    INDUCTOR,
    ExternKernelSchedulerNode,
    InductorChoices,
    inductor_config,
)


def schedule(*externs: int) -> SimpleNamespace:
    """A chain of 40 nodes; each reads the one before, and some of them are no kernels of Inductor's own."""
    nodes = {}
    for k in range(40):
        node = object.__new__(ExternKernelSchedulerNode) if k in externs else SimpleNamespace()
        reads = [SimpleNamespace(name=f"buf{k - 1}")] if k else []
        node.__dict__.update(  # type: ignore[attr-defined]
            min_order=k,
            max_order=k,
            unmet_dependencies=reads,
            get_name=lambda k=k: f"op{k}",
            get_nodes=lambda k=k: [nodes[f"op{k}"]],
            is_reduction=lambda k=k: k == 1,
        )
        nodes[f"op{k}"] = node
    buffers = {f"buf{k}": SimpleNamespace(defining_op_name=lambda k=k: f"op{k}") for k in range(40)}
    return SimpleNamespace(name_to_node=nodes, name_to_buf=buffers)


@pytest.mark.parametrize(
    ("extern", "theirs", "joined"),
    [
        (10, True, True),
        (21, True, True),
        (30, True, False),
        (39, True, True),
        (10, False, False),  # what Inductor does not join stays apart
    ],
)
def test_no_operator_is_moved_far_ahead(
    extern: int, theirs: bool, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: theirs))
    made = schedule(extern)
    first, other = made.name_to_node["op1"], made.name_to_node["op39"]
    assert NearFusions().can_fuse_horizontal(made, first, other, 8) is joined
    assert NearFusions().can_fuse_horizontal(made, other, first, 8) is joined


@pytest.mark.parametrize(
    ("externs", "joined"),
    [
        ((), True),
        ((2,), True),
        ((30,), True),
        ((2, 3), False),
        ((2, 30), False),
        ((0, 2, 39), True),
    ],
)
def test_a_sum_does_not_wait_for_what_reads_it(externs: tuple[int, ...], joined: bool) -> None:
    made = schedule(*externs)
    first, other = made.name_to_node["op1"], made.name_to_node["op39"]
    assert NearFusions().can_fuse_vertical(made, first, other, 8) is joined
    assert NearFusions().can_fuse_vertical(made, made.name_to_node["op2"], other, 8)


def test_choices_of_the_user_s_own_stay() -> None:
    class Mine(InductorChoices):
        def uuid(self) -> str:
            return "mine"

    with inductor_config.patch(inductor_choices_class=Mine), near_fusions(fx.Graph(), True):
        assert inductor_config.inductor_choices_class is Mine
    with INDUCTOR.set_choices_handler(Mine()), near_fusions(fx.Graph(), True):
        assert isinstance(INDUCTOR.choices, Mine)
        assert not isinstance(INDUCTOR.choices, NearFusions)
    with INDUCTOR.set_choices_handler(InductorChoices()), near_fusions(fx.Graph(), True):
        assert isinstance(INDUCTOR.choices, NearFusions)
        assert inductor_config.inductor_choices_class is NearFusions

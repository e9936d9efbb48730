"""Plans under DDP and FSDP2 in two processes, which `sac_rank_worker` runs, and which write their results to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sac.sac_rank_worker import WORLD
from tests.test_distributed import load, outputs, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of two ranks."""
    there = tmp_path_factory.mktemp("sac-ranks")
    ((_, errors),) = outputs([start("tests.sac.sac_rank_worker", str(there))])
    for rank in range(WORLD):
        (there / f"stderr.{rank}").write_text(errors)
    return there


@pytest.mark.parametrize(
    "case", ["ddp", "shard_then_apply", "apply_then_shard", "checkpointed_below"]
)
def test_the_same_gradients_as_without_a_plan(folder: Path, case: str) -> None:
    for by_rank in load(folder, case):
        result: dict[str, Any] = by_rank["result"]
        assert result["gradients"] > 10
        assert result["equal"]
        assert result["planned"] == 2 * result["plain"], "layers are recomputed"


def test_what_is_sharded_within_a_checkpointed_module_is_refused(folder: Path) -> None:
    for by_rank in load(folder, "sharded_within"):
        message = by_rank["result"]
        assert message.startswith("module 'layers.0': the module runs other operators")
        assert "checkpoint what is sharded, or what is below" in message

"""What operators allocate."""

from __future__ import annotations

import pytest
import torch

from remat.sac.run.operators import allocated_bytes


def test_cuda_allocates_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [allocated_bytes(n, cuda) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated_bytes(513, cpu) == 513
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert allocated_bytes(513, cuda) == 513

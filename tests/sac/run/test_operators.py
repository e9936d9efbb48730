"""What operators allocate."""

from __future__ import annotations

import torch

from remat.sac.run.operators import allocated_bytes


def test_cuda_allocates_blocks() -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [allocated_bytes(n, cuda) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated_bytes(513, cpu) == 513

"""The devices whose fake tensors this build of PyTorch can differentiate on this machine."""

from __future__ import annotations

import torch

from remat import torch_compat
from remat.errors import CaptureError


def fakeable(device: str | torch.device) -> torch.device:
    """Checks that fake tensors on a device can be differentiated by this build.

    Raises:
        CaptureError: they cannot; the message says which can.
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CaptureError(f"device is {device!r}: {str(error).splitlines()[0]}") from None
    if asked.type in _fakeable_types() and not _lacks(asked):
        return asked
    raise CaptureError(
        f"device '{asked}' cannot be faked by this build of PyTorch ({torch.__version__}) on this "
        f"machine; it can fake: {', '.join(_fakeable_types())}. A cost model may still name a GPU: "
        "capture on 'cpu' and plan with cost='roofline:h100'"
    )


def _fakeable_types() -> list[str]:
    """Device types that this build can differentiate here; asking a device could end the process."""
    built = {
        "cpu": True,
        "cuda": not _lacks(torch.device("cuda")),
        "mps": torch.backends.mps.is_built(),
        "xpu": torch_compat.xpu_is_compiled(),
        torch_compat.get_privateuse1_backend_name(): hasattr(
            torch, torch_compat.get_privateuse1_backend_name()
        ),
    }
    return [name for name, there in built.items() if there]


def _lacks(device: torch.device) -> bool:
    """Whether it is a GPU of CUDA's that is not here: autograd asks even a fake one for its context."""
    return device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()

"""What stands in the place of a module's ``forward`` where a plan has been applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from remat.sac.run.module_calls import own_forward


class Replaced(ABC):
    """What stands in the place of a module's ``forward`` where a plan has been applied.

    An object and not a closure, so that a copy of the model runs the copy's forward, and a pickled
    model can be read again. In eval mode, and where no gradients are wanted, the module runs as it did.

    Attributes:
        before: what stood there; None where it is the method of the class.
    """

    def __init__(self, module: nn.Module) -> None:
        self.before = own_forward(module)
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        return self._planned(*args, **kwargs)

    @abstractmethod
    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the module in training, as the plan says."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

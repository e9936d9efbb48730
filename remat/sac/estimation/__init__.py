"""What checkpointing each module of a model frees, and what it takes."""

from __future__ import annotations

from remat.sac.estimation.estimator import Estimate as Estimate

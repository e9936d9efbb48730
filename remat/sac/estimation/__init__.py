"""Memory that checkpointing each module frees, and the time that it takes."""

from __future__ import annotations

from remat.sac.estimation.estimator import Estimate as Estimate

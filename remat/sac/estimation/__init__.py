"""Estimates of the memory that checkpointing each module frees, and of the time it takes."""

from __future__ import annotations

from remat.sac.estimation.estimator import Estimate as Estimate

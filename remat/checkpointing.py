"""Selective checkpointing in one call, under its public name; see `remat.sac.api.checkpointing`."""

from __future__ import annotations

from remat.sac.api.checkpointing import Checked as Checked
from remat.sac.api.checkpointing import check as check
from remat.sac.api.checkpointing import estimate as estimate
from remat.sac.api.checkpointing import plan as plan
from remat.sac.api.checkpointing import read_memory as read_memory

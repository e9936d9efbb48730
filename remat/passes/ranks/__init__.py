"""One plan on all ranks."""

from remat.passes.ranks.protocol import RankWarning as RankWarning

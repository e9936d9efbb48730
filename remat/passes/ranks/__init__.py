"""Agreement of all ranks of a job on one plan for the same graph."""

from remat.passes.ranks.protocol import RankWarning as RankWarning

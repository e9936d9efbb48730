"""Reduce a joint graph at which something fails to a smaller graph that still fails."""

from remat.reduction.search import Reduced as Reduced
from remat.reduction.search import reduce as reduce

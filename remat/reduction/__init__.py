"""A joint graph at which something fails, made smaller while it still fails."""

from remat.reduction.search import Reduced as Reduced
from remat.reduction.search import reduce as reduce

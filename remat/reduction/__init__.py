"""Turn a joint graph that fails a test into a smaller joint graph that still fails this test."""

from remat.reduction.search import Reduced as Reduced
from remat.reduction.search import reduce as reduce

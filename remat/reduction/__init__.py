"""Reduce a joint graph that fails a test to a smaller graph that still fails the test."""

from remat.reduction.search import Reduced as Reduced
from remat.reduction.search import reduce as reduce

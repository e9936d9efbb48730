"""Passes over joint graphs, and the pipelines that run passes."""

from remat.passes.core.base import Pass as Pass
from remat.passes.core.base import Stage as Stage
from remat.passes.core.pipeline import Pipeline as Pipeline
from remat.passes.core.state import Analysis as Analysis
from remat.passes.core.state import PassResult as PassResult
from remat.passes.core.state import State as State

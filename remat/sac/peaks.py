"""The earlier place of what simulates a step: `remat.sac.solve.peaks`."""

from remat.sac.solve.peaks import Simulated as Simulated
from remat.sac.solve.peaks import moments_of_interest as moments_of_interest
from remat.sac.solve.peaks import simulate as simulate

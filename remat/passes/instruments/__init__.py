"""Instruments for pipelines: timing, statistics, dumps, checks, bisection and reproducers."""

from remat.passes.instruments.bisection import BadPass, OptBisect, bisect
from remat.passes.instruments.dumps import Dumps, PrintChanged, Printed
from remat.passes.instruments.reproducer import Reproducer
from remat.passes.instruments.statistics import Statistics
from remat.passes.instruments.timing import Timing
from remat.passes.instruments.verify_each import VerifyEach

__all__ = [
    "BadPass",
    "Dumps",
    "OptBisect",
    "PrintChanged",
    "Printed",
    "Reproducer",
    "Statistics",
    "Timing",
    "VerifyEach",
    "bisect",
]

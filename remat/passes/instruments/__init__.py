"""Instruments for pipelines: timing, dumps, checks, bisection and reproducers."""

from remat.passes.instruments.bisection import BadPass as BadPass
from remat.passes.instruments.bisection import OptBisect as OptBisect
from remat.passes.instruments.bisection import bisect as bisect
from remat.passes.instruments.printed import Printed as Printed
from remat.passes.instruments.reproducer import Reproducer as Reproducer
from remat.passes.instruments.timing import Timing as Timing
from remat.passes.instruments.verify_each import VerifyEach as VerifyEach

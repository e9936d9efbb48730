"""Cost models; each returns the cost of one run of a node, as an integer."""

from __future__ import annotations

from remat.graph.costs.auto import Auto as Auto
from remat.graph.costs.base import CostModel as CostModel
from remat.graph.costs.base import node_costs as node_costs
from remat.graph.costs.base import reporting as reporting
from remat.graph.costs.calibration import calibrate as calibrate
from remat.graph.costs.calibration import calibrated as calibrated
from remat.graph.costs.counting import Flops as Flops
from remat.graph.costs.counting import Unit as Unit
from remat.graph.costs.counting import count_flops as count_flops
from remat.graph.costs.devices import DEVICES as DEVICES
from remat.graph.costs.devices import Device as Device
from remat.graph.costs.profile import Profile as Profile
from remat.graph.costs.roofline import Roofline as Roofline
from remat.graph.costs.roofline import RooflineFused as RooflineFused
from remat.graph.costs.store import CostWarning as CostWarning


def builtin_cost_models() -> list[type[CostModel]]:
    """Return the classes of remat's own cost models, the default model first."""
    return [Auto, Roofline, RooflineFused, Profile, Flops, Unit]

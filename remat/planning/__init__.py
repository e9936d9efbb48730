"""From a joint graph and a budget to a plan, a frontier, a set of plans, a comparison."""

from remat.planning.plan import Plan as Plan

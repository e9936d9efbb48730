"""The earlier place of what estimates modules: `remat.sac.estimate.modules`."""

from remat.sac.estimate.modules import ModuleStats as ModuleStats
from remat.sac.estimate.modules import ModuleTree as ModuleTree
from remat.sac.estimate.modules import collect_modules as collect_modules

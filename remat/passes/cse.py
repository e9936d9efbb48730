"""Re-export `remat.passes.joint.cse` under the import path that code outside remat uses."""

from remat.passes.joint.cse import CommonSubexpressions as CommonSubexpressions
from remat.passes.joint.cse import merge as merge

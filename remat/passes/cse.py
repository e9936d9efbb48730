"""`remat.passes.joint.cse`, at the path that outside code imports."""

from remat.passes.joint.cse import CommonSubexpressions as CommonSubexpressions
from remat.passes.joint.cse import merge as merge

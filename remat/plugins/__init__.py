"""Register and discover plugins, which add solvers, passes, analyses, operators and cost models to remat."""

from remat.plugins.hooks import hookimpl as hookimpl
from remat.plugins.registry import PluginWarning as PluginWarning
from remat.plugins.registry import Registry as Registry
from remat.plugins.registry import registry as registry
from remat.solvers.isolation.process import isolated as isolated

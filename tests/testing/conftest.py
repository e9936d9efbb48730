"""Settings of the tests of the pytest plugin."""

from remat.plugins.registry import registry

# pytester takes what a run imported out of sys.modules again; solvers imported by then would be
# other classes than those that the registry knows.
registry().solvers  # noqa: B018

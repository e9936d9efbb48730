"""Settings shared by all tests."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# A machine that is busy with something else is no fault of a test.
settings.register_profile("remat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("remat")

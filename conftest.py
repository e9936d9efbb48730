"""Settings shared by all tests."""

pytest_plugins = ["pytester"]

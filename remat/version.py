"""The version of remat, as pyproject.toml says it too."""

__version__ = "0.1.0"

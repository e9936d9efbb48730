"""The command ``remat``."""

from remat.cli.commands import main

__all__ = ["main"]

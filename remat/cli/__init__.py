"""The command line ``remat``, whose commands are registered when this package is imported."""

import pkgutil
from importlib import import_module

try:
    for _module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{_module.name}")
    from remat.cli.commands import main
except KeyboardInterrupt:  # Ctrl-C may come while the command itself is still being loaded
    raise SystemExit(130) from None

__all__ = ["main"]

"""The command line ``remat``: importing this package registers all commands."""

from importlib import import_module

try:
    for _module in [
        "compare",
        "diff",
        "explain",
        "fit",
        "frontier",
        "instances",
        "lists",
        "opt",
        "plan",
        "policies",
        "reduce",
        "repro",
        "run",
        "sac",
        "sweep",
    ]:
        import_module(f"remat.cli.{_module}")
    from remat.cli.commands import main
except KeyboardInterrupt:  # Ctrl-C may come while the command itself is still being loaded
    raise SystemExit(130) from None

__all__ = ["main"]

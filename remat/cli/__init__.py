"""The command line ``remat``: importing this package registers all commands."""

try:
    from remat.cli import compare as _compare  # noqa: F401 - its command registers itself
    from remat.cli import diff as _diff  # noqa: F401 - its command registers itself
    from remat.cli import explain as _explain  # noqa: F401 - its commands register themselves
    from remat.cli import fit as _fit  # noqa: F401 - its command registers itself
    from remat.cli import frontier as _frontier  # noqa: F401 - its command registers itself
    from remat.cli import instances as _instances  # noqa: F401 - its commands register themselves
    from remat.cli import lists as _lists  # noqa: F401 - its commands register themselves
    from remat.cli import opt as _opt  # noqa: F401 - its command registers itself
    from remat.cli import plan as _plan  # noqa: F401 - its command registers itself
    from remat.cli import policies as _policies  # noqa: F401 - its command registers itself
    from remat.cli import reduce as _reduce  # noqa: F401 - its command registers itself
    from remat.cli import repro as _repro  # noqa: F401 - its command registers itself
    from remat.cli import run as _run  # noqa: F401 - its command registers itself
    from remat.cli import sac as _sac  # noqa: F401 - its command registers itself
    from remat.cli import sweep as _sweep  # noqa: F401 - its command registers itself
    from remat.cli.commands import main
except KeyboardInterrupt:  # Ctrl-C while the command itself is still being loaded
    raise SystemExit(130) from None

__all__ = ["main"]

"""Entry point of ``python -m remat``, which runs the command ``remat``."""

import os
import sys


def _drop_working_directory() -> None:
    """Remove the working directory from the front of ``sys.path``, where ``python -m`` puts it."""
    # Otherwise a file `torch.py` in it would be imported instead of PyTorch. If remat itself is in it, the directory
    # moves to the end, so that subprocesses still find remat.
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        here = sys.path.pop(0)
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:
            sys.path.append(here)


if __name__ == "__main__":
    _drop_working_directory()
    from remat.cli import main

    main(prog_name="remat")

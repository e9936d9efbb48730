"""``python -m remat`` is the command ``remat``."""

import os
import sys


def _drop_working_directory() -> None:
    """Takes away what ``python -m`` puts first on the path: ``torch.py`` there would be PyTorch.

    It becomes the last where remat itself lies there, so that processes of its own find it too.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        here = sys.path.pop(0)
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:
            sys.path.append(here)


if __name__ == "__main__":
    _drop_working_directory()
    from remat.cli import main

    main(prog_name="remat")

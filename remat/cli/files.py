"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a text file under another name first, so that nobody ever sees half of it.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():  # a pipe or a terminal
        target.write_text(text)
        return
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise

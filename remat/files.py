"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file under another name first, so that nobody ever sees half of it; text as UTF-8.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    target = path.resolve()
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():  # a pipe or a terminal
        target.write_bytes(data)
        return
    draft = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise

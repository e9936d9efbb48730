"""Files: written whole or not at all, read with one line for whatever is wrong."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from remat.errors import ProblemError

T = TypeVar("T")


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


def read_as(
    what: str, path: str | os.PathLike[str], parse: Callable[[str], T], max_bytes: int
) -> T:
    """What a file of text in UTF-8 holds.

    Args:
        what: what it should hold, for the message.
        path: the file.
        parse: makes it of the text; raises a ``ValueError``, such as a `ProblemError`, where it cannot.
        max_bytes: more are refused.

    Raises:
        ProblemError: there is no such file, or it holds something else; one line says why.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ProblemError(f"it is larger than the {max_bytes} bytes that are read")
        return parse(data.decode())
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError as error:
        reason = f"it is no text in UTF-8: byte {error.start}"
    except ValueError as error:  # a ProblemError; a path with a null in it
        reason = str(error)
    raise ProblemError(f"{what} '{path}' cannot be read: {reason}")

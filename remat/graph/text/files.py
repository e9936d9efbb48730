"""Joint graphs in files of text."""

from __future__ import annotations

import os
from pathlib import Path

from remat.errors import RematError
from remat.files import read_as, write_whole
from remat.graph.joint import JointGraph
from remat.graph.text.graphs import parse_joint, print_joint
from remat.graph.text.syntax import MAX_BYTES, check_size

#: What files of joint graphs end with.
SUFFIX = ".joint"


def write_joint(path: str | os.PathLike[str], joint: JointGraph) -> None:
    """Writes a joint graph to a file, whole or not at all.

    Raises:
        ProblemError: the graph has no text form, or one larger than what can be read again.
        RematError: the file cannot be written; what was there before is as it was.
    """
    text = print_joint(joint)
    check_size(text)
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise RematError(f"joint graph '{path}' cannot be written: {error.strerror}") from error


def read_joint(path: str | os.PathLike[str]) -> JointGraph:
    """Reads a joint graph from a file; nothing in a file can run.

    Raises:
        ProblemError: there is no such file, or it holds no joint graph; the message says where in
            the file what was expected.
    """
    return read_as("joint graph", path, parse_joint, MAX_BYTES)

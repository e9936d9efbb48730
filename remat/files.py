"""Files: written whole or not at all, read with one line for whatever is wrong; and records as JSON."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

from remat.errors import PlanError, ProblemError, RematError

T = TypeVar("T")

#: Bytes of a saved record beyond which it is not read.
MAX_RECORD_BYTES = 2**30


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically: under another name first, then renamed. Text is written as UTF-8.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_bytes(data)
        return
    target = resolved(path)
    # In the same folder, since a rename is atomic only within one file system.
    draft = target.with_name(f".remat-{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            # Otherwise a crash soon after the rename could leave an empty file.
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:  # Ctrl-C must not leave the draft behind either
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str],
    hint: str = "",
    *,
    what: str = "",
    error: type[RematError] = ProblemError,
) -> Iterator[None]:
    """Say in one line that a file cannot be written.

    Args:
        path: the file.
        hint: what to do, for the end of the message.
        what: what it holds, for its beginning.
        error: what to raise.

    Raises:
        RematError: of the class ``error``, for an OSError.
    """
    try:
        yield
    except OSError as wrong:
        subject = f"{what} '{os.fspath(path)}'".lstrip()
        raise error(f"{subject} cannot be written: {wrong.strerror or wrong}{hint}") from wrong


def resolved(path: Path) -> Path:
    """A path without links and dots.

    Raises:
        OSError: its links lead in a circle.
    """
    try:
        return path.resolve()
    except RuntimeError:  # what Python before 3.13 makes of it
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


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


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a record: a dataclass has it as its ``form``.

    Attributes:
        what: what it is, for messages: "plan".
        key: the key of the JSON object under which the version stands.
        version: version of the fields; another one is refused.
        dropped: fields of earlier versions, of the record or of a part of it, each with the reason why a file
            that uses one is refused.
        ignored: fields of earlier versions that are read over.
    """

    what: str
    key: str
    version: int
    dropped: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


def write_record(record: Any) -> str:
    """The JSON of a dataclass with a ``form``: its public fields; `read_record` reads it."""
    return json.dumps(_plain(record), indent=2) + "\n"


def read_record(
    kind: type[T], text: Any, *, error: type[RematError] = ProblemError, **known: Any
) -> T:
    """Reads what `write_record` wrote, strictly: the version, each field of its declared type, no other.

    A field with a default may be missing, as in files from before it was added.

    Args:
        kind: the dataclass. Its fields are bools, ints, floats, texts, tuples and mappings of those, and
            dataclasses of such fields.
        text: the JSON.
        error: what to raise.
        known: fields that are not in the file.

    Raises:
        RematError: of the class ``error``; the text is no such record, cut off, of another version, or
            has wrong fields.
    """
    form: Form = kind.form  # type: ignore[attr-defined]
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as wrong:
        raise error(f"this is not a saved {form.what}: {wrong}") from None
    try:
        return _record(kind, data, form, known)  # type: ignore[no-any-return]
    except ValueError as wrong:  # a ProblemError of the dataclass itself, too
        raise error(str(wrong)) from None


def save_record(
    record: Any, path: str | os.PathLike[str], *, error: type[RematError] = ProblemError
) -> None:
    """Writes the JSON of a dataclass with a ``form`` to a file, whole or not at all.

    Raises:
        RematError: of the class ``error``; the file cannot be written, and what was there is as it was.
    """
    with writing(path, what=record.form.what, error=error):
        write_atomic(Path(path), write_record(record))


def load_record(
    kind: type[T], path: str | os.PathLike[str], *, error: type[RematError] = ProblemError
) -> T:
    """Read a file of `save_record`.

    Raises:
        RematError: of the class ``error``; there is no such file, or it holds something else.
    """
    form: Form = kind.form  # type: ignore[attr-defined]
    try:
        return read_as(form.what, path, lambda text: read_record(kind, text), MAX_RECORD_BYTES)
    except ProblemError as wrong:
        raise error(str(wrong)) from None


class Record:
    """A plan that can be kept in a file: a dataclass with a ``form``."""

    __slots__ = ()
    form: ClassVar[Form]

    def to_json(self) -> str:
        """The plan as JSON, without modules of graphs."""
        return write_record(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`.

        Raises:
            PlanError: the text is no such plan, cut off, of another version, or has wrong fields.
        """
        return read_record(cls, text, error=PlanError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file, whole or not at all.

        Raises:
            PlanError: the file cannot be written; what was there before is as it was.
        """
        save_record(self, path, error=PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the file that `save` wrote.

        Raises:
            PlanError: there is no such file, or it holds something else.
        """
        return load_record(cls, path, error=PlanError)


def as_tuples(value: Any) -> Any:
    """Turn lists into tuples, recursively, also in dictionaries."""
    if isinstance(value, dict):
        return {key: as_tuples(v) for key, v in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if not is_dataclass(value):
        return value
    kind, form = value.__class__, getattr(value, "form", None)
    head = {} if form is None else {form.key: form.version}
    return head | {name: _plain(getattr(value, name)) for name in _fields(kind)}


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The public fields of a dataclass: the type of each, and whether it may be missing."""
    hints = get_type_hints(kind)
    return {
        f.name: (hints[f.name], f.default is not MISSING)
        for f in fields(kind)
        if not f.name.startswith("_")
    }


def _record(kind: Any, data: Any, whole: Form, known: Mapping[str, Any]) -> Any:
    """A dataclass from an object of JSON; ``whole`` is the form of what it is or is a part of."""
    form: Form | None = getattr(kind, "form", None)
    what = f"saved {(form or whole).what}"
    data = dict(data) if isinstance(data, dict) else {}
    if form is not None:
        if form.key not in data:
            raise ValueError(f"this is not a {what}: expected JSON with the key '{form.key}'")
        version = data.pop(form.key)
        if version != form.version:
            raise ValueError(
                f"this {form.what} is of version {version!r}; this remat reads version {form.version}"
            )
    for name in (form or whole).ignored:
        data.pop(name, None)
    for name, reason in (form or whole).dropped:
        if data.pop(name, None):
            raise ValueError(f"{what}: field '{name}' {reason}")
    wanted = {name: of for name, of in _fields(kind).items() if name not in known}
    missing = sorted(n for n, (_, optional) in wanted.items() if not optional and n not in data)
    unknown = sorted(data.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(f"{what}: fields missing: {missing}, unknown: {unknown}")
    values = {n: _value(wanted[n][0], v, whole, f"{what}: field '{n}'") for n, v in data.items()}
    try:
        return kind(**values, **known)
    except ProblemError as wrong:
        raise ValueError(f"{what}: {wrong}") from None


def _value(wanted: Any, value: Any, whole: Form, where: str) -> Any:
    """A value of JSON as a declared type has it; a bool is no int."""
    kinds = get_args(wanted)
    if is_dataclass(wanted):
        return _record(wanted, value, whole, {})
    if get_origin(wanted) is tuple and type(value) is list:
        every = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(every) == len(value):
            return tuple(_value(k, v, whole, where) for k, v in zip(every, value, strict=True))
    if get_origin(wanted) is Mapping and type(value) is dict:
        return {key: _value(kinds[1], v, whole, where) for key, v in value.items()}
    if wanted is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if type(value) is wanted:
        return value
    raise ValueError(f"{where} is {value!r:.60}, expected {wanted if kinds else wanted.__name__}")

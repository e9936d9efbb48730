"""Write files atomically, read files with one-line errors, and store dataclasses as JSON."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

from remat.errors import PlanError, ProblemError, RematError

T = TypeVar("T")

#: Size in bytes of the largest file that `Record.load` reads.
MAX_RECORD_BYTES = 2**30


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, to a file atomically; write to a pipe or a standard stream directly.

    Raises:
        OSError: the file cannot be written. The file's previous content is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    standard = _standard_stream(path)
    if standard is not None:
        # Opening the path again would empty the file that the stream is redirected to, or write at another position.
        standard.flush()  # earlier text comes first
        standard.buffer.write(data)
        standard.flush()
        return
    if is_stream(path):
        path.write_bytes(data)
        return
    target = resolved(path)
    # The temporary file is in the same folder, since a rename is atomic only within one file system.
    draft = target.with_name(f".remat-{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            # Otherwise a crash soon after the rename could leave an empty file.
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:  # even Ctrl-C must not leave the temporary file behind
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def is_stream(path: Path) -> bool:
    """Whether a path names a pipe, a terminal, or this process's standard output or error."""
    return (path.exists() and not path.is_file()) or _standard_stream(path) is not None


def _standard_stream(path: Path) -> Any:
    """Return the standard stream that a path such as ``/dev/stdout`` names; None if it names another file."""
    for stream in (sys.stdout, sys.stderr):
        # A stream without a descriptor, such as the one of a test, names no file.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str],
    hint: str = "",
    *,
    kind: str = "",
    error: type[RematError] = ProblemError,
) -> Iterator[None]:
    """Convert an OSError in the ``with`` block into an error of class ``error``, whose message has one line.

    Args:
        path: the file that the block writes.
        hint: advice to append to the message.
        kind: kind of content, such as ``"plan"``, which the message names before the path.
        error: class of the error to raise.
    """
    try:
        yield
    except OSError as cause:
        subject = f"{kind} '{os.fspath(path)}'".lstrip()
        raise error(f"{subject} cannot be written: {cause.strerror or cause}{hint}") from cause


def write_file(
    path: str | os.PathLike[str],
    content: str | bytes,
    kind: str,
    error: type[RematError] = RematError,
) -> None:
    """Write a file atomically, as `write_atomic` does; if that fails, raise an error as `writing` does."""
    with writing(path, kind=kind, error=error):
        write_atomic(Path(path), content)


def resolved(path: Path) -> Path:
    """Return the absolute path without symbolic links, ``.`` and ``..``.

    Raises:
        OSError: the symbolic links form a cycle.
    """
    cycle = OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    try:
        target = path.resolve()
    except RuntimeError:  # Python before 3.13 raises this for a cycle
        raise cycle from None
    if target.is_symlink():  # Python 3.13 returns a link of the cycle
        raise cycle
    return target


def read_as(
    kind: str, path: str | os.PathLike[str], parse: Callable[[str], T], max_bytes: int
) -> T:
    """Read a UTF-8 text file and return its parsed content.

    Args:
        kind: kind of content, such as ``"plan"``, for the error message.
        path: the file.
        parse: function that converts the text, and raises a ``ValueError`` if the text is invalid.
        max_bytes: size in bytes above which the file is refused.

    Raises:
        ProblemError: the file is missing, unreadable, too large, not UTF-8, or has invalid content.
            The message has one line.
    """
    try:
        with Path(path).open("rb") as file:
            # The file's size is not queried, because a pipe has none.
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ProblemError(f"it is larger than the {max_bytes} bytes that are read")
        return parse(data.decode())
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError as error:
        reason = f"it is no text in UTF-8: byte {error.start}"
    except ValueError as error:  # raised by `parse`, or by `open` for a null character in the path
        reason = str(error)
    raise ProblemError(f"{kind} '{path}' cannot be read: {reason}")


@dataclass(frozen=True, slots=True)
class Form:
    """Kind and version of the JSON of a dataclass, stored in the class attribute ``form`` of the dataclass.

    Attributes:
        kind: kind of the record, for messages, such as ``"plan"``.
        key: JSON key under which the record stores its version.
        version: version of the fields; a file of any other version is refused.
    """

    kind: str
    key: str
    version: int


def write_record(record: Any) -> str:
    """Return the public fields of a dataclass that has a `Form`, as JSON text that `read_record` parses."""
    return json.dumps(_plain(record), indent=2) + "\n"


def read_record(
    kind: type[T], text: Any, *, error: type[RematError] = ProblemError, **other_fields: Any
) -> T:
    """Parse the JSON of `write_record` strictly, and return an instance of the dataclass.

    Each field in the JSON must have its declared type, and unknown fields are refused. A field with a default may
    be missing, since older files lack newer fields.

    Args:
        kind: the dataclass. Its fields are bools, ints, floats, texts, dataclasses with such fields,
            and tuples and mappings of these.
        text: the JSON.
        error: class of the error to raise.
        other_fields: values of the fields that are not stored in the JSON, by field name.

    Raises:
        RematError: of class ``error``, if the text is not JSON of ``kind``, is cut off, has another
            version, or has wrong fields.
    """
    form: Form = kind.form  # type: ignore[attr-defined]
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as fault:
        raise error(f"this is not a saved {form.kind}: {fault}") from None
    try:
        return _record(kind, data, form, other_fields)  # type: ignore[no-any-return]
    except ValueError as fault:  # includes a ProblemError that the dataclass raised
        raise error(str(fault)) from None


def save_record(record: Any, path: str | os.PathLike[str]) -> None:
    """Write a dataclass that has a `Form` to a JSON file, atomically.

    Raises:
        PlanError: the file cannot be written. The file's previous content is unchanged.
    """
    write_file(path, write_record(record), record.form.kind, PlanError)


class Record:
    """Base class of dataclasses, such as plans, that can be saved as JSON files."""

    __slots__ = ()
    form: ClassVar[Form]

    def to_json(self) -> str:
        """Return the public fields of this object as JSON text, without the graph modules of a plan."""
        return write_record(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse JSON text that `to_json` returned, and return an instance of the class.

        Raises:
            PlanError: the text is not JSON of this class, is cut off, has another version, or has
                wrong fields.
        """
        return read_record(cls, text, error=PlanError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON text of this object, as `to_json` returns it, to a file atomically.

        Raises:
            PlanError: the file cannot be written. The file's previous content is unchanged.
        """
        save_record(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an instance of the class from a JSON file that `save` wrote.

        Raises:
            PlanError: the file is missing, or its content is not of this class.
        """
        kind = cls.form.kind
        try:
            return read_as(kind, path, lambda text: read_record(cls, text), MAX_RECORD_BYTES)
        except ProblemError as error:
            raise PlanError(str(error)) from None


def check_figures(record: Any, names: Iterable[str], where: str = "", *, bits: int = 100) -> None:
    """Raise a ProblemError if one of a record's named attributes is negative, NaN, or 2**bits or more.

    The error message has the text ``where`` before the attribute's name.
    """
    for name in names:
        value = getattr(record, name)
        if not 0 <= value < 2**bits:  # False for NaN, too
            raise ProblemError(
                f"{where}{name} is {value}, expected 0 or more, and less than 2**{bits}"
            )


def as_tuples(value: Any) -> Any:
    """Convert lists to tuples recursively, also inside dictionaries."""
    if isinstance(value, dict):
        return {key: as_tuples(v) for key, v in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Convert a dataclass to dictionaries and lists for JSON, and add the version of its `Form`."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if not is_dataclass(value):
        return value
    kind, form = value.__class__, getattr(value, "form", None)
    head = {} if form is None else {form.key: form.version}
    return head | {name: _plain(getattr(value, name)) for name in _fields(kind)}


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return a dict from each public field of a dataclass to the pair (type, whether it has a default)."""
    hints = get_type_hints(kind)
    return {
        f.name: (hints[f.name], f.default is not MISSING)
        for f in fields(kind)
        if not f.name.startswith("_")
    }


def _record(kind: Any, data: Any, outermost: Form, other_fields: Mapping[str, Any]) -> Any:
    """Build a dataclass from a JSON object; raise a ValueError that names the field if a field has the wrong type."""
    # Messages name the form `outermost`, of the outermost dataclass, if `kind` has no form. `other_fields` has the
    # values of the fields that are not in the JSON.
    form: Form | None = getattr(kind, "form", None)
    subject = f"saved {(form or outermost).kind}"
    data = dict(data) if isinstance(data, dict) else {}
    if form is not None:
        if form.key not in data:
            raise ValueError(f"this is not a {subject}: expected JSON with the key '{form.key}'")
        version = data.pop(form.key)
        if version != form.version:
            raise ValueError(
                f"this {form.kind} is of version {version!r}; this remat reads version {form.version}"
            )
    wanted = {name: of for name, of in _fields(kind).items() if name not in other_fields}
    missing = sorted(n for n, (_, optional) in wanted.items() if not optional and n not in data)
    unknown = sorted(data.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(f"{subject}: fields missing: {missing}, unknown: {unknown}")
    values = {
        n: _value(wanted[n][0], v, outermost, f"{subject}: field '{n}'") for n, v in data.items()
    }
    try:
        return kind(**values, **other_fields)
    except ProblemError as error:
        raise ValueError(f"{subject}: {error}") from None


def _value(wanted: Any, value: Any, outermost: Form, where: str) -> Any:
    """Convert a JSON value to a declared type; if that fails, raise a ValueError that names the field ``where``."""
    # An int is accepted for a float; a bool is not accepted for an int.
    kinds = get_args(wanted)
    if is_dataclass(wanted):
        return _record(wanted, value, outermost, {})
    if get_origin(wanted) is tuple and type(value) is list:
        every = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(every) == len(value):
            return tuple(_value(k, v, outermost, where) for k, v in zip(every, value, strict=True))
    if get_origin(wanted) is Mapping and type(value) is dict:
        return {key: _value(kinds[1], v, outermost, where) for key, v in value.items()}
    # Larger ints stay ints and are refused below: from 2**1024 on, an int does not fit in a float.
    if wanted is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if type(value) is wanted:
        return value
    raise ValueError(f"{where} is {value!r:.60}, expected {wanted if kinds else wanted.__name__}")

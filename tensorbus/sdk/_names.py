"""What callers give as names, ids, versions, shapes and switches, checked before anybody is asked."""

from __future__ import annotations

import operator

from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import NAME_BYTES_MAX, check_name, is_system_id
from tensorbus.model import TensorSpec, dtype
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._plain import a_type


def name_of(ref: object, *, id: object, key: object) -> tuple[str, str]:
    """How a caller names an artifact: ``any``, ``id`` or ``key``, and the text.

    Raises:
        InvalidArgumentError: If it is not exactly one name, or no text that can be one.
    """
    given = [(by, text) for by, text in (("any", ref), ("id", id), ("key", key)) if text is not None]
    if len(given) != 1:
        raise InvalidArgumentError("name the artifact once: as the first argument, or by id=, or by key=")
    by, text = given[0]
    return by, check_ref(text)


def check_ref(text: object) -> str:
    """A key or id.

    Raises:
        InvalidArgumentError: If it can be neither.
    """
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"an artifact is named by a non-empty str, not {text!r:.80}")
    if not is_system_id(text):
        return check_name(text, what="the name of an artifact")
    return _written(text, what="the id of an artifact")


def check_prefix(text: object) -> str:
    """What names are to begin with.

    Raises:
        InvalidArgumentError: If no name can.
    """
    if not isinstance(text, str):
        raise InvalidArgumentError(f"a prefix is a str, not {a_type(text)}")
    return _written(text, what="a prefix")


def _written(text: str, *, what: str) -> str:
    try:
        nbytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(f"{what} {text[:40]!r} cannot be written as UTF-8: {exc.reason}") from exc
    if nbytes > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"{what} is {nbytes} bytes long, the most is {NAME_BYTES_MAX}", nbytes=nbytes)
    return text


def id_of(artifact: object) -> str:
    """The id of the artifact of a handle.

    Raises:
        InvalidArgumentError: If it is a view's, or none.
    """
    if not isinstance(artifact, AsyncArtifact):
        raise InvalidArgumentError(f"an artifact is a handle, a key or an id, not {a_type(artifact)}")
    if artifact.id != artifact.base_id:
        raise refused_view(artifact.id)
    return artifact.id


def refused_view(view: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{view} is a view and cannot have names of its own; put its tensors")


def check_version(number: object) -> int:
    """The number of a version.

    Raises:
        InvalidArgumentError: If it is none.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidArgumentError(f"a version is a whole number from 1 on, not {number!r:.80}")
    return number


def spec_of(shape: object, kind: object) -> TensorSpec:
    """The tensor of that shape and dtype, as a caller gives them.

    Raises:
        InvalidArgumentError: If they cannot be.
    """
    sizes = shape if isinstance(shape, list | tuple) else (shape,)
    return TensorSpec("", dtype(kind).name, tuple(_size(size, shape) for size in sizes))


def _size(size: object, shape: object) -> int:
    try:
        if not isinstance(size, bool):
            return operator.index(size)  # type: ignore[arg-type]  # a TypeError is the check
    except TypeError:
        pass
    raise InvalidArgumentError(f"a shape is a whole number from 0 on, or a tuple of them, not {shape!r:.80}")

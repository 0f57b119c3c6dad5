"""What callers give as names, ids, versions and shapes, checked."""

from __future__ import annotations

from tensorbus.errors import InvalidArgumentError
from tensorbus.model import TensorSpec, dtype
from tensorbus.sdk._artifact import AsyncArtifact


def name_of(ref: object, *, id: object, key: object) -> tuple[str, str]:
    """How a caller names an artifact: ``any``, ``id`` or ``key``, and the text.

    Raises:
        InvalidArgumentError: If it is not exactly one name, or no text.
    """
    given = [(by, text) for by, text in (("any", ref), ("id", id), ("key", key)) if text is not None]
    if len(given) != 1:
        raise InvalidArgumentError("name the artifact once: as the first argument, or by id=, or by key=")
    by, text = given[0]
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"an artifact is named by a non-empty str, not {text!r:.80}")
    return by, text


def id_of(artifact: object) -> str:
    """The id of an artifact that a caller gave, as a handle or as the id itself.

    Raises:
        InvalidArgumentError: If it is a view, or neither.
    """
    if isinstance(artifact, AsyncArtifact):
        if artifact.id != artifact.base_id:
            raise InvalidArgumentError(f"{artifact.id} is a view and cannot have names of its own; put its tensors")
        return artifact.id
    if not isinstance(artifact, str):
        raise InvalidArgumentError(f"an artifact is a handle or an id, not a {type(artifact).__name__}")
    return artifact


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
    sizes = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, list | tuple) else ("?",)
    return TensorSpec("", dtype(kind).name, sizes)

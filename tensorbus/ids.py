"""Names that the system makes: random ids, and subject tokens derived from a user's text. See ``docs/spec/ids.md``."""

from __future__ import annotations

import base64
import re
import secrets
from typing import NewType, Protocol

from blake3 import blake3

from tensorbus.errors import InvalidArgumentError

ArtifactId = NewType("ArtifactId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
LeaseId = NewType("LeaseId", str)
EventId = NewType("EventId", str)
Token = NewType("Token", int)

CONTENT_PREFIX = "tb1:"
RANDOM_PREFIX = "tbr:"
VIEW_PREFIX = "tbv:"
RESERVED_PREFIXES = (CONTENT_PREFIX, RANDOM_PREFIX, VIEW_PREFIX)
NAME_BYTES_MAX = 1024
TENSOR_NAME_BYTES_MAX = 64 * 1024
_WORKER = re.compile(r"[A-Za-z0-9_-]{1,64}")


class IdSource(Protocol):
    """Where random ids come from; a simulator passes a seeded one."""

    def hex(self, nbytes: int) -> str:
        """``2 * nbytes`` lower-case hexadecimal digits."""
        ...


class SystemIds:
    """Ids from the operating system's random source."""

    def hex(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)


_DIGITS = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [first + second for first in _DIGITS for second in _DIGITS]


def b32(data: bytes) -> str:
    """Lower-case base32 without padding."""
    if len(data) % 5:
        return base64.b32encode(data).decode("ascii").rstrip("=").lower()
    number = int.from_bytes(data, "big")  # for every fact that is folded: half of what the standard library takes
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(len(data) * 8 - 10, -1, -10)])


def prefixed(*parts: str) -> bytes:
    """The parts as UTF-8, each after its length in bytes as a little-endian u32."""
    out = bytearray()
    for part in parts:
        raw = part.encode("utf-8")
        out += len(raw).to_bytes(4, "little") + raw
    return bytes(out)


def subject_token(kind: str, tenant: str, name: str) -> str:
    """The 32 characters that stand for a user's text in a subject: base32 of 160 bits of BLAKE3(kind, tenant, name)."""
    return b32(blake3(prefixed(kind, tenant, name)).digest(length=20))


def run_id(tenant: str, key: str) -> str:
    """The id ``[a-z2-7]{32}`` of the run that the caller's idempotency key names."""
    return b32(blake3(prefixed("run", tenant, key)).digest(length=20))


def new_incarnation(ids: IdSource) -> Incarnation:
    """One life of one process: 16 hexadecimal digits."""
    return Incarnation(ids.hex(8))


def new_event_id(ids: IdSource) -> EventId:
    return EventId(ids.hex(16))


def new_lease_id(ids: IdSource) -> LeaseId:
    return LeaseId(ids.hex(12))


def random_artifact_id(ids: IdSource) -> ArtifactId:
    """An id for bytes whose digest is not known yet."""
    return ArtifactId(RANDOM_PREFIX + ids.hex(20))


def is_system_id(text: str) -> bool:
    """Whether the text is an id by its form, so never a key or a given id."""
    return text.startswith(RESERVED_PREFIXES)


def check_worker_id(text: str) -> WorkerId:
    if not _WORKER.fullmatch(text):
        raise InvalidArgumentError(f"worker id {text!r} must be 1 to 64 of the characters A-Z a-z 0-9 _ -", worker=text)
    return WorkerId(text)


def check_name(text: object, *, what: str) -> str:
    """A key, series name or given id as the caller wrote it.

    Raises:
        InvalidArgumentError: If it is not text, empty, over 1,024 bytes of UTF-8, not encodable, or begins with a
            reserved prefix.
    """
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{what} must be a str, not {type(text).__name__}")
    if not text:
        raise InvalidArgumentError(f"{what} must not be empty")
    if is_system_id(text):
        raise InvalidArgumentError(
            f"{what} {text[:40]!r} begins with a prefix that only the system gives ({', '.join(RESERVED_PREFIXES)})"
        )
    _check_utf8(text, what=what, limit=NAME_BYTES_MAX)
    return text


def check_tensor_name(text: object) -> str:
    """A tensor's name within its artifact; the empty name is allowed (a bare tensor has it)."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"a tensor name must be a str, not {type(text).__name__}")
    _check_utf8(text, what="tensor name", limit=TENSOR_NAME_BYTES_MAX)
    return text


def _check_utf8(text: str, *, what: str, limit: int) -> None:
    if len(text) <= limit and text.isascii():
        return
    try:
        nbytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(f"{what} {text[:40]!r} cannot be written as UTF-8: {exc.reason}") from exc
    if nbytes > limit:
        raise InvalidArgumentError(f"{what} is {nbytes} bytes long, the most is {limit}", nbytes=nbytes, limit=limit)

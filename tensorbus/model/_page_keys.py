"""Keys of pages: hashes of the tokens up to and with the page, chained. See ``docs/spec/pages.md``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import prefixed
from tensorbus.model._keyspace import Keyspace

KEY_BYTES: Final = 32
ANCHOR_BYTES: Final = 2
"""The leading bytes of a key, which name its shard, are those of its anchor's hash."""
TOKEN_ID_MAX: Final = 2**32 - 1

Keys = npt.NDArray[np.uint8]
"""uint8[n, 32]"""


class KeyChain:
    """Makes the keys of one growing sequence of tokens.

    The hash of page *i* is BLAKE3 of the hash of page *i* - 1 and the page's token ids as little-endian u32; the chain
    begins with BLAKE3 of the keyspace's digest and the salt. A key is the first 2 bytes of the hash of page
    ``anchor_pages * (i // anchor_pages)``, then the first 30 of page *i*'s own: pages of one request lie together.

    Args:
        salt: Makes the keys of the same tokens different, e.g. per user; text counts as UTF-8.
    """

    def __init__(self, keyspace: Keyspace, salt: str | bytes | None = None) -> None:
        self._step = 4 * keyspace.page_tokens
        self._anchor_pages = keyspace.anchor_pages
        self._hash = _seed(keyspace, salt)
        self._anchor = b""
        self._rest = b""
        self.pages = 0
        """How many keys were made so far."""

    @property
    def pending_tokens(self) -> int:
        """Tokens that do not fill a page yet."""
        return len(self._rest) // 4

    def extend(self, tokens: Sequence[int] | npt.ArrayLike) -> Keys:
        """Take further tokens and give the keys of the pages that they fill.

        Args:
            tokens: int[m], of numpy, torch on the CPU, or a list.

        Returns:
            uint8[k, 32] for the k pages that are full now and were not before.

        Raises:
            InvalidArgumentError: If they are no token ids from 0 to 2**32 - 1.
        """
        raw = self._rest + _token_bytes(tokens)
        count, step, last = len(raw) // self._step, self._step, self._hash
        view, hashes, anchors = memoryview(raw), list[bytes](), list[bytes]()
        for page in range(count):
            last = blake3(last + view[page * step : (page + 1) * step]).digest()
            hashes.append(last)
            if (self.pages + page) % self._anchor_pages == 0:
                self._anchor = last[:ANCHOR_BYTES]
            anchors.append(self._anchor)
        self._hash, self._rest = last, raw[count * step :]
        self.pages += count
        keys = np.empty((count, KEY_BYTES), np.uint8)
        keys[:, ANCHOR_BYTES:] = _rows(hashes, KEY_BYTES)[:, : KEY_BYTES - ANCHOR_BYTES]
        keys[:, :ANCHOR_BYTES] = _rows(anchors, ANCHOR_BYTES)
        return keys


def page_keys(keyspace: Keyspace, tokens: Sequence[int] | npt.ArrayLike, salt: str | bytes | None = None) -> Keys:
    """The keys of a request's full pages; see :class:`KeyChain`.

    Args:
        tokens: int[m], of numpy, torch on the CPU, or a list.

    Returns:
        uint8[m // page_tokens, 32]; the tokens after the last full page have none.

    Raises:
        InvalidArgumentError: If they are no token ids from 0 to 2**32 - 1.
    """
    return KeyChain(keyspace, salt).extend(tokens)


def request_key(keyspace: Keyspace, request_id: str) -> Keys:
    """The key uint8[1, 32] under which a request's manifest is kept; never that of a page.

    Raises:
        InvalidArgumentError: If the id is not a text that has a UTF-8 form.
    """
    try:
        raw = blake3(keyspace.digest + prefixed("request", request_id)).digest()
    except (UnicodeEncodeError, AttributeError) as exc:
        raise InvalidArgumentError(f"a request's id is a valid text, not {request_id!r:.80}") from exc
    return _rows([raw], KEY_BYTES).copy()


def shard_of(keys: Keys, shards: int) -> npt.NDArray[np.int64]:
    """int64[n]: the shard of each key, by its leading 16 bits.

    Args:
        keys: uint8[n, 32].
        shards: How many there are, 1 to 65,536.
    """
    leading = keys[:, 0].astype(np.int64) << 8 | keys[:, 1]
    return leading * shards >> 16


def _seed(keyspace: Keyspace, salt: str | bytes | None) -> bytes:
    if not isinstance(salt, str | bytes | None):
        raise InvalidArgumentError(f"a salt is text or bytes, not {type(salt).__name__}", argument="salt")
    try:
        raw = salt.encode() if isinstance(salt, str) else salt
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError("the salt is no valid Unicode", argument="salt") from exc
    return blake3(keyspace.digest + prefixed("chain") + (b"" if raw is None else b"\x01" + raw)).digest()


def _token_bytes(tokens: Any) -> bytes:
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise InvalidArgumentError(f"these are no token ids: {exc}", argument="tokens") from exc
    if ids.size == 0 and ids.ndim == 1:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"token ids are one row of whole numbers, not {ids.dtype}{list(ids.shape)}", argument="tokens"
        )
    if (ids.dtype.kind == "i" and ids.min() < 0) or ids.max() > TOKEN_ID_MAX:
        raise InvalidArgumentError(
            f"token ids are from 0 to {TOKEN_ID_MAX}; these are from {ids.min()} to {ids.max()}", argument="tokens"
        )
    return ids.astype("<u4").tobytes()


def _rows(items: list[bytes], width: int) -> Keys:
    return np.frombuffer(b"".join(items), np.uint8).reshape(-1, width)

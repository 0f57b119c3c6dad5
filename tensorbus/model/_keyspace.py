"""What pages of one kind have in common; another keyspace never sees them. See ``docs/spec/pages.md``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from blake3 import blake3

from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import NAME_BYTES_MAX, prefixed
from tensorbus.model._dtypes import dtype

HASH_VERSION: Final = 1
"""Version of the way in which keys are made from token ids."""
ANCHOR_PAGES: Final = 256
FRAGMENTS_MAX: Final = 4096
PAGE_TOKENS_MAX: Final = 1 << 16

Part = tuple[int, int]
"""A rank and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyspace:
    """Everything that makes two KV-cache pages of the same tokens different things.

    The ranks of one parallel group share a keyspace's :attr:`digest` and all keys; each holds its own
    :attr:`fragment` of a page, and a page is there when all fragments are.

    Args:
        model: Name of the model.
        weight_version: Of the weights that computed the pages; a number or a text, which differ.
        dtype: Element type of the cache, any spelling that the library knows; kept under our name.
        layout: How a page's elements lie, as text that producer and reader agree on, e.g. ``[2,blocks,heads,dim]``.
        page_tokens: Tokens per page.
        tp: Rank and size of tensor parallelism; likewise ``pp`` (pipeline) and ``cp`` (context).
        adapter: Name and version of a LoRA adapter, if one took part.
        quantization: Of the cache, beyond its element type.
        anchor_pages: How many consecutive pages of a chain lie in one shard.
        tenant: Whose it is; the bus fills it in.

    Attributes:
        digest: 32 bytes that name the keyspace; the same in every process and for every rank of the group.

    Raises:
        InvalidArgumentError: If a part is none that can be.
    """

    model: str
    weight_version: int | str
    dtype: str
    layout: str
    page_tokens: int
    tp: Part = (0, 1)
    pp: Part = (0, 1)
    cp: Part = (0, 1)
    adapter: str | None = None
    quantization: str | None = None
    anchor_pages: int = ANCHOR_PAGES
    hash_version: int = HASH_VERSION
    tenant: str = "default"
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "layout", "tenant"):
            _check_text(name, getattr(self, name))
        for name in ("adapter", "quantization"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if isinstance(self.weight_version, str):
            _check_text("weight_version", self.weight_version)
        else:
            _check_number("weight_version", self.weight_version, 0, 2**63 - 1)
        _check_number("page_tokens", self.page_tokens, 1, PAGE_TOKENS_MAX)
        _check_number("anchor_pages", self.anchor_pages, 1, 2**31)
        if self.hash_version != HASH_VERSION:
            raise InvalidArgumentError(
                f"hash_version {self.hash_version!r} is not known here; this library makes version {HASH_VERSION}"
            )
        for name in ("tp", "pp", "cp"):
            object.__setattr__(self, name, _part(name, getattr(self, name)))
        if self.fragments > FRAGMENTS_MAX:
            raise InvalidArgumentError(f"{self.fragments} ranks hold one page; at most {FRAGMENTS_MAX} can")
        object.__setattr__(self, "dtype", dtype(self.dtype).name)
        object.__setattr__(self, "digest", self._digest())

    @property
    def fragments(self) -> int:
        """How many ranks hold a part of each page."""
        return self.tp[1] * self.pp[1] * self.cp[1]

    @property
    def fragment(self) -> int:
        """The number of this rank's part, from 0."""
        return (self.pp[0] * self.cp[1] + self.cp[0]) * self.tp[1] + self.tp[0]

    def rank(self, *, tp: int | None = None, pp: int | None = None, cp: int | None = None) -> Keyspace:
        """The same keyspace as another rank of the group sees it.

        Raises:
            InvalidArgumentError: If there is no such rank.
        """
        return replace(
            self,
            tp=self.tp if tp is None else (tp, self.tp[1]),
            pp=self.pp if pp is None else (pp, self.pp[1]),
            cp=self.cp if cp is None else (cp, self.cp[1]),
        )

    def of_tenant(self, tenant: str) -> Keyspace:
        """The same keyspace of another tenant."""
        return self if tenant == self.tenant else replace(self, tenant=tenant)

    def _digest(self) -> bytes:
        version = self.weight_version
        parts = [
            "keyspace",
            self.tenant,
            self.model,
            f"s{version}" if isinstance(version, str) else f"n{version}",
            self.dtype,
            self.layout,
            *("-" if text is None else f"={text}" for text in (self.adapter, self.quantization)),
            *(str(part[1]) for part in (self.tp, self.pp, self.cp)),
            *(str(number) for number in (self.page_tokens, self.anchor_pages, self.hash_version)),
        ]
        return blake3(prefixed(*parts)).digest()


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text or len(text.encode("utf-8", "replace")) > NAME_BYTES_MAX:
        raise InvalidArgumentError(
            f"a keyspace's {name} is a text of 1 to {NAME_BYTES_MAX} bytes, not {text!r:.80}", argument=name
        )
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(f"a keyspace's {name} is no valid Unicode: {text!r:.80}", argument=name) from exc


def _check_number(name: str, number: object, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise InvalidArgumentError(
            f"a keyspace's {name} is a whole number from {least} to {most}, not {number!r:.80}", argument=name
        )


def _part(name: str, given: object) -> Part:
    if (
        not isinstance(given, tuple | list)
        or len(given) != 2
        or any(type(number) is not int for number in given)
        or not 0 <= given[0] < given[1]
    ):
        raise InvalidArgumentError(
            f"a keyspace's {name} is (rank, size) with 0 <= rank < size, not {given!r:.80}", argument=name
        )
    return given[0], given[1]

"""Keyspaces and the keys of pages."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError
from tensorbus.model import KeyChain, Keyspace, page_keys, request_key, shard_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "page_keys.json").read_text())
BASE: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "weight_version": 3,
    "dtype": "bf16",
    "layout": "[2,blocks,heads,dim]",
    "page_tokens": 16,
}
KS = Keyspace(**BASE)
OTHERS: list[dict[str, Any]] = [
    {"model": "Qwen/Qwen3-4B"},
    {"weight_version": 4},
    {"weight_version": "3"},
    {"dtype": "f8_e4m3fn"},
    {"layout": "[blocks,2,heads,dim]"},
    {"page_tokens": 32},
    {"tp": (0, 2)},
    {"pp": (0, 2)},
    {"cp": (0, 2)},
    {"adapter": "lora-1"},
    {"quantization": "per-head"},
    {"quantization": "-"},
    {"anchor_pages": 128},
    {"tenant": "other"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_whatever_differs_is_another_keyspace(other: dict[str, Any]) -> None:
    there = Keyspace(**{**BASE, **other})
    tokens = np.arange(64)
    assert there.digest != KS.digest
    assert not np.array_equal(page_keys(there, tokens)[0], page_keys(KS, tokens)[0])


def test_no_two_of_all_keyspaces_are_one() -> None:
    digests = {Keyspace(**{**BASE, **other}).digest for other in OTHERS}
    assert len(digests) == len(OTHERS)
    assert {name for other in OTHERS for name in other} | {"hash_version", "digest"} == {
        f.name for f in fields(Keyspace)
    }


def test_the_ranks_of_a_group_share_keys_and_hold_fragments_of_their_own() -> None:
    group = Keyspace(**BASE, tp=(0, 2), pp=(0, 3), cp=(0, 2))
    ranks = [group.rank(tp=t, pp=p, cp=c) for t in range(2) for p in range(3) for c in range(2)]
    assert {rank.digest for rank in ranks} == {group.digest}
    assert sorted(rank.fragment for rank in ranks) == list(range(group.fragments)) == list(range(12))
    with pytest.raises(InvalidArgumentError, match=r"0 <= rank < size"):
        group.rank(tp=2)


def test_spellings_of_a_dtype_are_one_keyspace() -> None:
    assert replace(KS, dtype="torch.bfloat16").digest == KS.digest
    assert KS.of_tenant("t").of_tenant("default") == KS


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", ""),
        ("model", "x" * 1025),
        ("model", 3),
        ("layout", "\ud800"),
        ("weight_version", -1),
        ("weight_version", 1.0),
        ("weight_version", True),
        ("weight_version", ""),
        ("page_tokens", 0),
        ("page_tokens", 1 << 17),
        ("anchor_pages", 0),
        ("tp", (2, 2)),
        ("tp", (0, 0)),
        ("tp", 2),
        ("pp", (0, 1, 2)),
        ("cp", (0.0, 1)),
        ("tp", (0, 5000)),
        ("adapter", ""),
        ("dtype", "b17"),
        ("hash_version", 2),
    ],
)
def test_what_is_no_part_of_a_keyspace_is_refused(part: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError):
        Keyspace(**{**BASE, part: value})


def test_keys_are_the_chain_that_the_specification_says() -> None:
    keyspace = replace(KS, anchor_pages=2)
    tokens = np.arange(5 * 16 + 3)
    last = blake3(keyspace.digest + b"\x05\x00\x00\x00chain\x01salt").digest()
    hashes = []
    for page in range(5):
        last = blake3(last + tokens[page * 16 : page * 16 + 16].astype("<u4").tobytes()).digest()
        hashes.append(last)
    expected = [hashes[page // 2 * 2][:2] + hashes[page][:30] for page in range(5)]
    assert [bytes(key) for key in page_keys(keyspace, tokens, "salt")] == expected


def test_keys_never_change() -> None:
    for case in GOLDEN:
        keyspace = Keyspace(**{**case["keyspace"], "tp": tuple(case["keyspace"].get("tp", (0, 1)))})
        assert keyspace.digest.hex() == case["digest"]
        assert [bytes(key).hex() for key in page_keys(keyspace, case["tokens"], case["salt"])] == case["keys"]
        assert bytes(request_key(keyspace, "req-42")[0]).hex() == case["request"]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9))
def test_a_growing_sequence_gets_the_keys_of_the_whole(tokens: list[int], steps: list[int], page_tokens: int) -> None:
    keyspace = replace(KS, page_tokens=page_tokens, anchor_pages=3)
    chain, got, at = KeyChain(keyspace, b"s"), [], 0
    for step in [*steps, len(tokens)]:
        got.append(chain.extend(tokens[at : at + step]))
        at = min(at + step, len(tokens))
    whole = page_keys(keyspace, tokens, b"s")
    assert np.array_equal(np.concatenate(got), whole)
    assert whole.shape == (len(tokens) // page_tokens, 32)
    assert (chain.pages, chain.pending_tokens) == divmod(len(tokens), page_tokens)


def test_any_kind_of_whole_numbers_gives_the_same_keys() -> None:
    torch = pytest.importorskip("torch")
    whole = page_keys(KS, list(range(100)))
    for kind in (np.int16, np.uint8, np.int64, np.uint64):
        assert np.array_equal(page_keys(KS, np.arange(100, dtype=kind)), whole)
    assert np.array_equal(page_keys(KS, np.arange(200)[::2] // 2), whole)
    assert np.array_equal(page_keys(KS, torch.arange(100)), whole)
    assert np.array_equal(page_keys(KS, range(100)), whole)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], ["a"], [[1, 2]], 5, None, [True], [10**30], [1, None]])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="token ids"):
        page_keys(replace(KS, page_tokens=1), tokens)


def test_salt_and_request_have_keys_of_their_own() -> None:
    tokens = np.arange(16)
    found = {bytes(page_keys(KS, tokens, salt)[0]) for salt in (None, "", "a", b"b")} | {bytes(request_key(KS, "a")[0])}
    assert len(found) == 5
    with pytest.raises(InvalidArgumentError):
        page_keys(KS, tokens, 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        request_key(KS, "\ud800")


def test_a_request_lies_in_one_shard_until_the_next_anchor() -> None:
    shards = shard_of(page_keys(KS, np.arange(16 * 600)), 64)
    assert [len(set(shards[i : i + 256].tolist())) for i in (0, 256, 512)] == [1, 1, 1]
    keys = np.frombuffer(np.random.default_rng(1).bytes(32 * 6400), np.uint8).reshape(-1, 32)
    for count in (1, 48, 64, 65_536):
        found = shard_of(keys, count)
        assert found.min() >= 0
        assert found.max() < count
    assert np.array_equal(shard_of(keys, 64), keys[:, 0] >> 2)

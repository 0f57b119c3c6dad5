"""Spill files: what is written is read back, anything else is an error; folders are one process's."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbus.errors import ConflictError, CorruptError, OutOfSpaceError, UnavailableError
from tensorbus.transport._pool import Pool, Segment
from tensorbus.transport._spill import SEGMENT_BYTES, SpillHeader, check_spill, read_header, read_spill, write_spill
from tensorbus.transport._spill_folder import CORRUPT_KEPT, SpillFolder

MIB = 1 << 20
GO = threading.Event()
SIZES = [(0,), (1,), (4096,), (100, 5000), (SEGMENT_BYTES,), (2 * SEGMENT_BYTES + 77, 3, MIB + 4096)]


def header(parts: tuple[int, ...], **changes: object) -> SpillHeader:
    made = SpillHeader(
        worker="w1",
        incarnation="i1",
        tenant="acme",
        artifact="tb1:x",
        born=7,
        born_ns=8,
        must=True,
        layout="{}",
        manifest="ü" * 10,
        parts=parts,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def contents(parts: tuple[int, ...], seed: int = 1) -> list[bytes]:
    return [random.Random(f"{seed}/{n}").randbytes(nbytes) for n, nbytes in enumerate(parts)]


def written(path: Path, parts: tuple[int, ...]) -> list[bytes]:
    data = contents(parts)
    write_spill(path, header(parts), [memoryview(one) for one in data], stop=GO)
    return data


def read_back(path: Path) -> list[bytes]:
    spill = read_header(path)
    rooms = [bytearray(nbytes) for nbytes in spill.header.parts]
    read_spill(spill, [memoryview(room) for room in rooms], stop=GO)
    return [bytes(room) for room in rooms]


@pytest.mark.parametrize("parts", SIZES)
def test_what_was_written_is_read_back(tmp_path: Path, parts: tuple[int, ...]) -> None:
    path = tmp_path / "a.tbs"
    data = written(path, parts)
    assert read_header(path).header == header(parts)
    assert read_header(path).nbytes == path.stat().st_size
    assert read_back(path) == data
    check_spill(read_header(path), stop=GO)
    assert [one.name for one in tmp_path.iterdir()] == ["a.tbs"]


def test_pool_memory_goes_past_the_page_cache_and_back(tmp_path: Path) -> None:
    nbytes = 3 * SEGMENT_BYTES + 5000
    pool = Pool(64 * MIB)

    def segment() -> Segment:
        return pool.allocate(nbytes, tenant="acme")

    try:
        source, target = segment(), segment()
        source.view[:] = random.Random(2).randbytes(nbytes)
        source.seal()
        with source.lease() as view:
            spill = write_spill(tmp_path / "a.tbs", header((nbytes,)), [view], stop=GO)
        read_spill(spill, [target.view], stop=GO)
        assert target.view == source.view
    finally:
        pool.close()


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_what_counts_is_found(
    tmp_path_factory: pytest.TempPathFactory, at: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("spill") / "a.tbs"
    parts = (5000, 100)
    written(path, parts)
    raw = bytearray(path.read_bytes())
    spill = read_header(path)
    head = len(spill.header.encode())
    counts = [*range(head), *range(spill.data, spill.data + 5000), *range(spill.data + 8192, spill.data + 8292)]
    counts += range(spill.data + spill.header.data_bytes, len(raw))
    raw[counts[int(at * len(counts))]] ^= 1 << bit
    path.write_bytes(raw)
    with pytest.raises(CorruptError):
        read_back(path)


@pytest.mark.parametrize("length", [0, 10, 48, 200, -1, -33])
def test_a_cut_file_is_corrupt(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.tbs"
    written(path, (5000,))
    raw = path.read_bytes()
    path.write_bytes(raw[:length])
    with pytest.raises(CorruptError):
        read_header(path)
    path.write_bytes(raw + b"x")
    with pytest.raises(CorruptError):
        read_header(path)


def test_a_table_of_another_file_is_corrupt(tmp_path: Path) -> None:
    """Bytes and checksums of one file under the header of another."""
    one, two = tmp_path / "1.tbs", tmp_path / "2.tbs"
    written(one, (5000,))
    write_spill(two, header((5000,), artifact="tb1:y"), [memoryview(b"y" * 5000)], stop=GO)
    data = read_header(one).data
    one.write_bytes(one.read_bytes()[:data] + two.read_bytes()[read_header(two).data :])
    with pytest.raises(CorruptError, match="table"):
        read_back(one)


def test_a_full_disk_is_out_of_space_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSpaceError, match="no room on the disk"):
        written(tmp_path / "a.tbs", (5000,))
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_write_leaves_nothing(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError):
        write_spill(tmp_path / "a.tbs", header((5000,)), [memoryview(bytes(5000))], stop=stop)
    assert list(tmp_path.iterdir()) == []


# -- folders -----------------------------------------------------------------------------------------------------------


def folder(root: Path, worker: str = "w1", **changes: object) -> SpillFolder:
    place = {"home": root / "home", "prefix": "tb", **changes}
    return SpillFolder(root, worker, home=Path(str(place["home"])), prefix=str(place["prefix"]))


def test_workers_that_share_a_folder_have_files_of_their_own(tmp_path: Path) -> None:
    one, two = folder(tmp_path, "w1"), folder(tmp_path, "w2")
    one.open()
    two.open()
    assert one.fresh
    written(one.place("acme", "tb1:x"), (100,))
    assert [spill.header.artifact for spill in one.spills()] == ["tb1:x"]
    assert list(two.spills()) == []
    one.close()
    again = folder(tmp_path, "w1")
    again.open()
    assert not again.fresh
    assert len(list(again.spills())) == 1
    again.close()
    two.close()


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    one, two = folder(tmp_path), folder(tmp_path)
    one.open()
    with pytest.raises(ConflictError, match=str(os.getpid())):
        two.open()
    one.close()
    two.open()
    two.close()


@pytest.mark.parametrize("changes", [{"home": Path("/elsewhere")}, {"prefix": "other"}])
def test_a_worker_of_the_same_id_elsewhere_is_another(tmp_path: Path, changes: dict[str, object]) -> None:
    one = folder(tmp_path)
    one.open()
    one.close()
    other = folder(tmp_path, "w1", **changes)
    with pytest.raises(ConflictError, match="belongs to another"):
        other.open()
    one.open()
    one.close()


def test_what_is_no_spill_file_is_put_aside_and_only_a_few_are_kept(tmp_path: Path) -> None:
    one = folder(tmp_path)
    one.open()
    good = one.place("acme", "tb1:x")
    written(good, (100,))
    (one.path / "half.tbs.tmp").write_bytes(b"x")
    for n in range(CORRUPT_KEPT + 3):
        (one.path / f"bad{n}.tbs").write_bytes(json.dumps({"n": n}).encode())
    (one.path / "moved.tbs").write_bytes(good.read_bytes())
    assert [spill.path for spill in one.spills()] == [good]
    assert len(list((one.path / "corrupt").iterdir())) == CORRUPT_KEPT
    one.close()
    one.open()
    assert not list(one.path.glob("*.tmp"))
    one.close()

"""The archive gives back what was written, or says what is wrong with it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
fsspec = pytest.importorskip("fsspec")

from tensorbus.bus import Archive, ArchiveFile, Message  # noqa: E402
from tensorbus.bus import _archive_files as files_module  # noqa: E402
from tensorbus.errors import (  # noqa: E402
    CorruptError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    UnavailableError,
)


@pytest.fixture(params=["local", "memory"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Archive]:
    if request.param == "local":
        yield Archive.open(str(tmp_path / "archive"))
        return
    url = f"memory://{tmp_path.name}"
    yield Archive.open(url)
    store = fsspec.filesystem("memory")
    if store.exists(url):
        store.rm(url, recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> Archive:
    return Archive.open(str(tmp_path / "archive"))


def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive" / "TB"


def fact(seq: int, data: bytes = b"{}") -> Message:
    return Message(seq, 1_700_000_000_000_000_000 + seq, f"tb.ev.key.x{seq % 3}.w1", {"Tb-Type": "KeyBound"}, data)


def facts(first: int, last: int, step: int = 1) -> list[Message]:
    return [fact(seq, str(seq).encode()) for seq in range(first, last + 1, step)]


def written(archive: Archive, *ranges: tuple[int, int]) -> list[ArchiveFile]:
    return [archive.write(facts(first, last, 2), first=first, last=last) for first, last in ranges]


def read(archive: Archive, files: Sequence[ArchiveFile], **limits: int) -> list[Message]:
    return [message for batch in archive.read(files, **limits) for message in batch]


# ------------------------------------------------------------------------------------------------------ what comes back

MESSAGES = st.lists(
    st.tuples(
        st.integers(1, 1000),
        st.integers(0, 2**63 - 1),
        st.text(min_size=1),
        st.dictionaries(st.text(), st.text(), max_size=3),
        st.binary(),
    ),
    max_size=30,
)


@given(MESSAGES, st.integers(0, 40), st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_messages_come_back_from_any_files(
    tmp_path: Path, rows: list[tuple[int, int, str, dict[str, str], bytes]], after: int, parts: int
) -> None:
    seq, messages = 0, list[Message]()
    for gap, *rest in rows:
        seq += gap
        messages.append(Message(seq, *rest))  # type: ignore[arg-type]
    archive = Archive.open(f"memory://{tmp_path.name}")
    per_file = len(messages) // parts + 1
    files, first = list[ArchiveFile](), 1
    for at in range(0, max(len(messages), 1), per_file):
        part = messages[at : at + per_file]
        last = part[-1].seq if part else first
        files.append(archive.write(part, first=first, last=last))
        first = last + 1
    assert read(archive, files) == messages
    assert sum(file.count for file in files) == len(messages)
    start = messages[after % len(messages)].seq if messages else 0
    assert read(archive, files, after=start) == [message for message in messages if message.seq > start]
    assert read(archive, files, upto=start) == [message for message in messages if message.seq <= start]
    assert archive.verify(files).problems == []


def test_thousands_of_facts_come_in_batches(archive: Archive) -> None:
    messages = facts(1, 10_000)
    file = archive.write(messages, first=1, last=10_000)
    batches = list(archive.read([file], after=5))
    assert len(batches) > 1
    assert [message for batch in batches for message in batch] == messages[5:]


def test_a_file_says_what_it_is(archive: Archive) -> None:
    file = archive.write(facts(5, 9, 2), first=3, last=12)
    assert (file.first, file.last, file.count) == (3, 12, 3)
    assert file.file == f"TB/{3:020d}-{12:020d}-{file.digest[:16]}.parquet"
    assert archive.files() == [file]


def test_the_same_facts_are_the_same_file(archive: Archive) -> None:
    first = archive.write(facts(1, 9), first=1, last=9)
    assert archive.write(facts(1, 9), first=1, last=9) == first
    assert archive.write(facts(1, 8), first=1, last=9) != first
    assert len(archive.verify([first]).extra) == 1


def test_a_range_without_facts_is_a_file_too(archive: Archive) -> None:
    files = [archive.write([], first=1, last=4), *written(archive, (5, 9))]
    assert [message.seq for message in read(archive, files)] == [5, 7, 9]
    assert archive.verify(files).problems == []


@pytest.mark.parametrize(
    ("seqs", "first", "last"), [((2, 1), 1, 2), ((1, 1), 1, 2), ((1, 2), 2, 2), ((1, 3), 1, 2), ((), 2, 1)]
)
def test_facts_must_be_in_order_and_in_range(archive: Archive, seqs: tuple[int, ...], first: int, last: int) -> None:
    with pytest.raises(InvalidArgumentError):
        archive.write([fact(seq) for seq in seqs], first=first, last=last)
    assert archive.files() == []


def test_other_programs_can_read_it(local: Archive, tmp_path: Path) -> None:
    import json

    from pyarrow import parquet

    file = local.write(facts(1, 3), first=1, last=4)
    table = parquet.read_table(tmp_path / "archive" / file.file)
    assert table.column_names == ["seq", "time_ns", "subject", "headers", "data"]
    assert table["seq"].to_pylist() == [1, 2, 3]
    assert json.loads(table["headers"][0].as_py()) == {"Tb-Type": "KeyBound"}
    said = json.loads(table.schema.metadata[b"tensorbus"])
    assert said == {"format": "1", "prefix": "tb", "stream": "TB", "first": 1, "last": 4}


def test_two_logs_may_share_a_folder(tmp_path: Path) -> None:
    one, other = (Archive.open(str(tmp_path), prefix=prefix) for prefix in ("tb", "other.tb"))
    mine, theirs = written(one, (1, 9)), written(other, (1, 9))
    assert one.files() == mine
    assert other.files() == theirs
    other.put_snapshot(9, "ab" * 16, [b"x"])
    assert one.list_snapshots() == []
    with pytest.raises(InvalidArgumentError, match=r"of the log 'other\.tb'"):
        read(one, theirs)


def test_nothing_is_there_before_something_was_written(archive: Archive) -> None:
    assert archive.files() == []
    assert archive.list_snapshots() == []
    assert archive.verify([]).problems == []
    assert read(archive, []) == []


# ---------------------------------------------------------------------------------------------------- what can be wrong


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    half = len(raw) // 2
    match how:
        case "cut off":
            path.write_bytes(raw[:half])
        case "empty":
            path.write_bytes(b"")
        case "a byte":
            path.write_bytes(raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :])
        case "longer":
            path.write_bytes(raw + b"x")
        case _:
            path.unlink()


@pytest.mark.parametrize("how", ["cut off", "empty", "a byte", "longer"])
def test_a_damaged_file_is_never_handed_out(local: Archive, tmp_path: Path, how: str) -> None:
    files = written(local, (1, 9), (10, 19), (20, 29))
    damage(tmp_path / "archive" / files[1].file, how)
    batches = local.read(files)
    assert [message.seq for message in next(batches)] == [1, 3, 5, 7, 9]
    with pytest.raises(CorruptError, match=f"{10:020d}"):
        next(batches)
    assert [message.seq for message in read(local, files, after=19)] == [20, 22, 24, 26, 28]
    with pytest.raises(CorruptError):
        local.files()
    report = local.verify(files)
    assert len(report.problems) == 1
    assert files[1].file in report.problems[0]
    assert report.facts == files[0].count + files[2].count
    assert report.files == 3


def test_a_missing_file_is_named_with_its_range(archive: Archive) -> None:
    files = written(archive, (1, 9), (10, 19))
    gone = replace(files[1], file=files[1].file.replace("parquet", "gone.parquet"))
    with pytest.raises(NotFoundError, match="from 10 to 19") as caught:
        read(archive, [files[0], gone])
    assert caught.value.details == {"file": gone.file, "first": 10, "last": 19}
    report = archive.verify([files[0], gone])
    assert len(report.problems) == 1
    assert report.extra == [files[1].file]


def test_a_hole_and_an_overlap_are_named(archive: Archive) -> None:
    files = written(archive, (1, 9), (12, 19), (15, 29))
    with pytest.raises(CorruptError, match="nothing from 10 to 11"):
        read(archive, files)
    with pytest.raises(CorruptError, match="overlaps"):
        read(archive, files[1:])
    report = archive.verify(files)
    assert [("hole" in problem, "overlaps" in problem) for problem in report.problems] == [(True, False), (False, True)]
    assert report.facts == sum(file.count for file in files)


def test_a_record_that_does_not_fit_its_file_is_found(archive: Archive) -> None:
    file = archive.write(facts(1, 9), first=1, last=9)
    with pytest.raises(CorruptError, match="has 9 facts, not 8"):
        read(archive, [replace(file, count=8)])
    for wrong in (replace(file, last=8), replace(file, first=2)):
        with pytest.raises(CorruptError, match="not from"):
            read(archive, [wrong])
    with pytest.raises(CorruptError, match="digest"):
        read(archive, [replace(file, digest="00" * 32)])


def test_a_check_goes_on_after_every_problem(local: Archive, tmp_path: Path) -> None:
    files = written(local, *((n, n + 9) for n in range(1, 61, 10)))
    for file, how in zip(files[1::2], ("gone", "a byte", "cut off"), strict=True):
        damage(tmp_path / "archive" / file.file, how)
    stray = written(local, (5, 7))[0]
    report = local.verify(files)
    assert len(report.problems) == 3
    assert report.extra == [stray.file]
    assert report.facts == sum(file.count for file in files[::2])


def test_no_parquet_at_all_is_corrupt(local: Archive, tmp_path: Path) -> None:
    from blake3 import blake3

    folder(tmp_path).mkdir(parents=True)
    digest = blake3(b"no parquet").hexdigest()
    name = f"TB/{1:020d}-{9:020d}-{digest[:16]}.parquet"
    (tmp_path / "archive" / name).write_bytes(b"no parquet")
    with pytest.raises(CorruptError, match="no Parquet file"):
        local.files()
    with pytest.raises(CorruptError, match="no Parquet file"):
        read(local, [ArchiveFile(file=name, first=1, last=9, count=1, digest=digest, nbytes=10)])


def test_without_a_log_the_files_that_reach_furthest_count(archive: Archive) -> None:
    files = written(archive, (1, 9), (10, 14), (15, 29), (30, 39))
    stray = written(archive, (10, 20), (10, 33))  # a store wrote them, and lost its lease before it could say so
    assert archive.files() == files
    assert [message.seq for message in read(archive, archive.files())][-1] == 38
    report = archive.verify()
    assert report.problems == []
    assert sorted(report.extra) == sorted(file.file for file in stray)


@pytest.mark.parametrize("stray", [(10, 14), (5, 25)])
def test_a_damaged_file_is_passed_over_where_others_have_its_range(
    local: Archive, tmp_path: Path, stray: tuple[int, int]
) -> None:
    files = written(local, (1, 9), (10, 19), (20, 29))
    left = written(local, stray)[0]
    damage(tmp_path / "archive" / left.file, "a byte")
    told = list[str]()
    assert local.files(passed_over=told.append) == files
    assert [left.file in text for text in told] == [True]
    report = local.verify()
    assert (report.problems, report.extra) == ([], [left.file])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_damaged_file_that_is_needed_is_an_error(local: Archive, tmp_path: Path, at: int) -> None:
    files = written(local, (1, 9), (10, 19), (20, 29))
    damage(tmp_path / "archive" / files[at].file, "a byte")
    with pytest.raises(CorruptError, match=files[at].file):
        local.files(passed_over=lambda _text: None)
    assert any(files[at].file in problem for problem in local.verify().problems)


def test_without_a_log_a_hole_is_still_one(archive: Archive) -> None:
    files = written(archive, (1, 9), (20, 29))
    assert archive.files() == files
    assert len(archive.verify().problems) == 1


# ---------------------------------------------------------------------------------------------------- what can go wrong


class Full:
    """A disk on which a number of bytes fit."""

    def __init__(self, room: int, code: int) -> None:
        self.room, self.code = room, code

    def fsync(self, handle: int) -> None:
        if os.fstat(handle).st_size > self.room:
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(
    local: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    files = written(local, (1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Full(100, code).fsync)
        with pytest.raises(OutOfSpaceError, match="no room"):
            written(local, (10, 19))
        with pytest.raises(OutOfSpaceError):
            local.put_snapshot(9, "ab" * 16, [os.urandom(1000)])
    assert os.listdir(folder(tmp_path)) == [Path(files[0].file).name]
    assert len(read(local, files + written(local, (10, 19)))) == 10


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
        ).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    try:
        archive = Archive.open(str(small))
        file = archive.write([fact(1)], first=1, last=1)
        with pytest.raises(OutOfSpaceError):
            archive.write([fact(2, os.urandom(200_000))], first=2, last=2)
        with pytest.raises(OutOfSpaceError):
            archive.put_snapshot(2, "ab" * 16, [os.urandom(200_000)])
        assert os.listdir(small / "TB") == [Path(file.file).name]
        assert archive.write([fact(2)], first=2, last=2).count == 1
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(local: Archive, tmp_path: Path) -> None:
    files = written(local, (1, 9))
    left, busy = folder(tmp_path) / "left.partial", folder(tmp_path) / "busy.partial"
    left.write_bytes(b"half")
    busy.write_bytes(b"half")
    assert local.files() == files
    with busy.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        files += written(local, (10, 19))
        assert not left.exists()
        assert busy.exists()
    assert local.verify(files).extra == []


def test_a_file_that_is_written_is_not_seen_before_it_is_whole(local: Archive) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(3):
            assert local.list_snapshots() == []
            yield os.urandom(300_000)

    local.put_snapshot(9, "ab" * 16, pieces())
    assert len(local.list_snapshots()) == 1


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    archive = Archive.open(str(tmp_path / "file"))
    with pytest.raises(UnavailableError):
        written(archive, (1, 9))


def test_a_store_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive.open(f"memory://{tmp_path.name}")
    store = fsspec.filesystem("memory")

    def refuse(error: Exception) -> None:
        def fail(*_args: Any, **_kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(type(store), "pipe_file", fail)

    for error, expected in (
        (PermissionError(errno.EACCES, "no"), DeniedError),
        (OSError(errno.ECONNRESET, "gone"), UnavailableError),
        (RuntimeError("no credentials"), UnavailableError),
    ):
        refuse(error)
        with pytest.raises(expected) as caught:
            written(archive, (1, 9))
        assert caught.value.__cause__ is error
    assert archive.files() == []


@pytest.mark.parametrize("url", ["nosuch://x/y", "s4://x"])
def test_a_url_that_nothing_knows(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be opened"):
        Archive.open(url)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in files_module._shown("ftp://me:secret@host/x")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive.open(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(InvalidArgumentError, match=r"tensorbus\[store\]"):
            written(archive, (1, 9))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidArgumentError, match=r"tensorbus\[store\]"):
        Archive.open(str(tmp_path))


def test_the_bus_needs_no_extra() -> None:
    program = "import sys, tensorbus.bus; sys.exit(bool({'pyarrow', 'fsspec', 'duckdb'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_snapshots_come_back_newest_first(archive: Archive) -> None:
    bodies = {seq: os.urandom(70_000) * 30 for seq in (5, 1_700_000_000_000_000, 40)}
    for seq, body in bodies.items():
        archive.put_snapshot(seq, f"{seq:016x}" * 4, [body[at : at + 100_001] for at in range(0, len(body), 100_001)])
    found = archive.list_snapshots()
    assert [(one.seq, one.hash) for one in found] == [(s, f"{s:016x}") for s in sorted(bodies, reverse=True)]
    for one in found:
        assert b"".join(archive.read_snapshot(one)) == bodies[one.seq]
    assert archive.files() == []
    assert archive.verify([]).extra == []


@pytest.mark.parametrize("how", ["cut off", "empty", "a byte", "gone"])
def test_a_damaged_snapshot_says_so(local: Archive, tmp_path: Path, how: str) -> None:
    one = local.put_snapshot(5, "ab" * 32, [b"x" * 100, os.urandom(10_000)])
    damage(tmp_path / "archive" / one.file, how)
    with pytest.raises(NotFoundError if how == "gone" else CorruptError):
        list(local.read_snapshot(one))

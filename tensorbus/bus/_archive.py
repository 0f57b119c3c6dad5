"""The archive: facts as Parquet files that follow each other without a hole, and snapshots beside them.

A file's name says its range and how its digest begins; which files count is said by the facts ``Archived`` on the log.
Everything here blocks; call it in a thread.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from tensorbus.bus._archive_files import Files
from tensorbus.bus._port import Message
from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError, TensorbusError
from tensorbus.events import Subjects

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "1"
ROW_GROUP: Final = 4096
BATCH: Final = 1024
"""Facts that are converted at once, which keeps the interpreter to itself for about a millisecond."""
PIECE_BYTES: Final = 1 << 20
_FACTS: Final = re.compile(r"(\d{20})-(\d{20})-([0-9a-f]{16})\.parquet")
_SNAPSHOT: Final = re.compile(r"snapshot-(\d{20})-([0-9a-f]{16})\.tbs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """The facts with ``first <= seq <= last``.

    Attributes:
        file: Path below the archive's URL.
        count: How many facts.
        digest: BLAKE3-256 of the file, lower-case hex.
        nbytes: Size of the file.
    """

    file: str
    first: int
    last: int
    count: int
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A Directory's bytes in the archive.

    Attributes:
        seq: The state's sequence.
        hash: How the state's hash begins.
    """

    file: str
    seq: int
    hash: str


@dataclass(slots=True)
class ArchiveReport:
    """What a check of the archive found.

    Attributes:
        files: How many were checked.
        facts: How many facts they hold.
        problems: What is wrong, in words.
        extra: Files that are there and that nothing names.
    """

    files: int = 0
    facts: int = 0
    problems: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


class Archive:
    """The archive of one log. Made by :meth:`open`.

    Args:
        files: Where it is.
        prefix: Subject prefix of the log; files of another one are refused.
        stream: Name of the log's stream, and of the folder that its files are in.
    """

    def __init__(self, files: Files, *, prefix: str, stream: str) -> None:
        self._files = files
        self._prefix = prefix
        self._stream = stream

    @classmethod
    def open(cls, url: str, *, prefix: str = "tb") -> Archive:
        """The archive in a folder or at a URL; nothing is read or made yet.

        Raises:
            InvalidArgumentError: If fsspec, or what it needs for such a URL, is not there.
        """
        return cls(Files(url), prefix=prefix, stream=Subjects(prefix).log_stream)

    @property
    def url(self) -> str:
        return self._files.url

    def exists(self) -> bool:
        """Whether anything of this log is there."""
        return bool(self._files.names(self._stream))

    # -- facts ---------------------------------------------------------------------------------------------------------

    def write(self, messages: Sequence[Message], *, first: int, last: int) -> ArchiveFile:
        """Write a file. The same messages give the same file, so that a repetition changes nothing.

        Args:
            messages: Facts in order, as the log has them.
            first: First sequence that the file speaks for: the one after the last file's last.
            last: Last sequence.

        Raises:
            InvalidArgumentError: If the messages are not in order within the range.
            OutOfSpaceError: If there is no room; DeniedError, UnavailableError: If it cannot be written.
        """
        seqs = [message.seq for message in messages]
        if not first <= last or seqs != sorted(set(seqs)) or (seqs and not first <= seqs[0] <= seqs[-1] <= last):
            raise InvalidArgumentError(f"messages out of order, or not all from {first} to {last}")
        body = _parquet(messages, {"prefix": self._prefix, "stream": self._stream, "first": first, "last": last})
        digest = blake3(body).hexdigest()
        name = f"{self._stream}/{first:020d}-{last:020d}-{digest[:16]}.parquet"
        self._files.write(name, _cut(body))
        return ArchiveFile(file=name, first=first, last=last, count=len(messages), digest=digest, nbytes=len(body))

    def files(self, *, passed_over: Callable[[str], None] | None = None) -> list[ArchiveFile]:
        """The files in the folder that follow each other, for when no log tells which count.

        A store that lost its lease may have left a file that overlaps others: those are chosen that reach furthest.

        Args:
            passed_over: Is told of each file that is not what its name says and that the others make up for.

        Raises:
            CorruptError: If one is not what its name says, and the others do not have all of its range.
        """
        sound, unsound = self._listed()
        chain = _chain(sound)
        for name, error in unsound:
            if not _covers(chain, *_range(name)):
                raise error
            if passed_over is not None:
                passed_over(str(error))
        return chain

    def read(self, files: Sequence[ArchiveFile], *, after: int = 0, upto: int | None = None) -> Iterator[list[Message]]:
        """The facts of files that follow each other, in batches; a file's digest is checked before anything comes out.

        Raises:
            NotFoundError: If a file is missing; CorruptError: If one is not what was written, or there is a hole.
        """
        problem = _hole(files)
        if problem:
            raise CorruptError(problem)
        for file in files:
            if file.last <= after or (upto is not None and file.first > upto):
                continue
            for batch in self._messages(file):
                chosen = [m for m in batch if m.seq > after and (upto is None or m.seq <= upto)]
                if chosen:
                    yield chosen

    def verify(self, files: Sequence[ArchiveFile] | None = None) -> ArchiveReport:
        """Check every file, and that they follow each other; goes on after a problem.

        Args:
            files: Those that there must be; those in the folder, by their names, when ``None``.
        """
        report = ArchiveReport()
        if files is None:
            sound, unsound = self._listed()
            files = _chain(sound)
            report.extra = [file.file for file in sound if file not in files]
            for name, error in unsound:
                if _covers(files, *_range(name)):
                    report.extra.append(name)
                else:
                    report.files += 1
                    report.problems.append(str(error))
        else:
            named = {file.file for file in files}
            there = (f"{self._stream}/{name}" for name in self._names(_FACTS))
            report.extra = [name for name in there if name not in named]
        report.files += len(files)
        for before, file in zip([None, *files], files, strict=False):
            if before is not None and (problem := _hole([before, file])):
                report.problems.append(problem)
            try:
                report.facts += sum(len(batch) for batch in self._messages(file))
            except TensorbusError as error:
                report.problems.append(str(error))
        return report

    def _listed(self) -> tuple[list[ArchiveFile], list[tuple[str, TensorbusError]]]:
        """The files in the folder, and those that are not what their names say, each with why."""
        sound, unsound = list[ArchiveFile](), list[tuple[str, TensorbusError]]()
        for name in self._names(_FACTS):
            try:
                sound.append(self._described(f"{self._stream}/{name}"))
            except TensorbusError as error:
                unsound.append((f"{self._stream}/{name}", error))
        return sound, unsound

    def _messages(self, file: ArchiveFile) -> Iterator[list[Message]]:
        body = self._body(file)
        count, last = 0, file.first - 1
        for batch in _batches(body, file.file, prefix=self._prefix):
            seqs = [last, *(message.seq for message in batch)]
            last = seqs[-1]
            if last > file.last or any(seq <= before for before, seq in pairwise(seqs)):
                what = f"{file.file} has facts out of order, or not from {file.first} to {file.last}"
                raise CorruptError(what, file=file.file)
            count += len(batch)
            yield batch
        if count != file.count:
            raise CorruptError(f"{file.file} has {count} facts, not {file.count}", file=file.file)

    def _body(self, file: ArchiveFile) -> bytes:
        try:
            body = b"".join(self._files.read(file.file))
        except NotFoundError as exc:
            what = f"the archive lacks {file.file}, the facts from {file.first} to {file.last}"
            raise NotFoundError(what, file=file.file, first=file.first, last=file.last) from exc
        if len(body) != file.nbytes or blake3(body).hexdigest() != file.digest:
            raise CorruptError(f"{file.file} is not the file that was archived: its digest differs", file=file.file)
        return body

    def _described(self, name: str) -> ArchiveFile:
        body = b"".join(self._files.read(name))
        found = _FACTS.fullmatch(name.rpartition("/")[2])
        digest = blake3(body).hexdigest()
        if found is None or not digest.startswith(found[3]):
            raise CorruptError(f"{name} is not what its name says: its digest differs", file=name)
        count = _reader(body, name).metadata.num_rows
        return ArchiveFile(
            file=name, first=int(found[1]), last=int(found[2]), count=count, digest=digest, nbytes=len(body)
        )

    def _names(self, pattern: re.Pattern[str]) -> list[str]:
        return [name for name in self._files.names(self._stream) if pattern.fullmatch(name)]

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def put_snapshot(self, seq: int, state_hash: str, pieces: Iterable[bytes]) -> StoredSnapshot:
        """Store a Directory's bytes, compressed.

        Raises:
            OutOfSpaceError: If there is no room; DeniedError, UnavailableError: If it cannot be written.
        """
        name = f"{self._stream}/snapshot-{seq:020d}-{state_hash[:16]}.tbs"
        self._files.write(name, _packed(pieces))
        return StoredSnapshot(file=name, seq=seq, hash=state_hash[:16])

    def list_snapshots(self) -> list[StoredSnapshot]:
        """Those that are there, the newest first."""
        found = []
        for name in self._names(_SNAPSHOT):
            said = _SNAPSHOT.fullmatch(name)
            assert said is not None
            found.append(StoredSnapshot(file=f"{self._stream}/{name}", seq=int(said[1]), hash=said[2]))
        return sorted(found, key=lambda one: one.seq, reverse=True)

    def read_snapshot(self, snapshot: StoredSnapshot) -> Iterator[bytes]:
        """Its bytes in pieces; they check themselves (``Loader``).

        Raises:
            NotFoundError: If it is missing; CorruptError: If it cannot be unpacked.
        """
        unpack = zlib.decompressobj()
        try:
            for packed in self._files.read(snapshot.file):
                while packed:
                    yield unpack.decompress(packed, PIECE_BYTES)
                    packed = unpack.unconsumed_tail
        except zlib.error as exc:
            raise CorruptError(f"{snapshot.file} cannot be unpacked: {exc}", file=snapshot.file) from exc
        if not unpack.eof:
            raise CorruptError(f"{snapshot.file} is cut off", file=snapshot.file)


def _hole(files: Sequence[ArchiveFile]) -> str:
    for before, file in pairwise(files):
        if file.first > before.last + 1:
            return f"the archive has a hole: nothing from {before.last + 1} to {file.first - 1}"
        if file.first <= before.last:
            return f"{file.file} overlaps {before.file}, which ends at {before.last}"
    return ""


def _chain(files: Sequence[ArchiveFile]) -> list[ArchiveFile]:
    """Of files that may overlap, those that follow each other furthest; after a hole, those from the next one on."""
    reach: dict[
        int, tuple[int, ArchiveFile]
    ] = {}  # by first sequence: how far one gets from there, and with which file
    for file in sorted(files, key=lambda file: (file.first, file.last, file.file), reverse=True):
        last = reach[file.last + 1][0] if file.last + 1 in reach else file.last
        if file.first not in reach or last > reach[file.first][0]:
            reach[file.first] = (last, file)
    chosen: list[ArchiveFile] = []
    at = min(reach, default=0)
    while at in reach:
        chosen.append(reach[at][1])
        at = chosen[-1].last + 1
        if at not in reach:
            at = min((first for first in reach if first > at), default=0)
    return chosen


def _range(name: str) -> tuple[int, int]:
    said = _FACTS.fullmatch(name.rpartition("/")[2])
    assert said is not None, "only names of files with facts are listed"
    return int(said[1]), int(said[2])


def _covers(files: Sequence[ArchiveFile], first: int, last: int) -> bool:
    """Whether files in order have every sequence of a range."""
    for file in files:
        if file.first <= first <= file.last:
            first = file.last + 1
    return first > last


def _packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    pack = zlib.compressobj(level=1)
    for piece in pieces:
        if packed := pack.compress(piece):
            yield packed
    yield pack.flush()


def _cut(body: bytes) -> Iterator[bytes]:
    return (body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as exc:
        raise InvalidArgumentError("the archive needs pyarrow: pip install 'tensorbus[store]'") from exc
    return pyarrow, pyarrow.parquet


def _parquet(messages: Sequence[Message], said: dict[str, object]) -> bytes:
    pa, parquet = _pyarrow()
    schema = pa.schema(
        [
            ("seq", pa.uint64()),
            ("time_ns", pa.int64()),
            ("subject", pa.string()),
            ("headers", pa.string()),
            ("data", pa.binary()),
        ],
        metadata={"tensorbus": json.dumps({"format": FORMAT, **said})},
    )
    sink = pa.BufferOutputStream()
    with parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        # A row group at a time: one conversion of a whole file would keep the interpreter to itself for long.
        for at in range(0, len(messages), ROW_GROUP):
            writer.write_batch(_record_batch(pa, schema, messages[at : at + ROW_GROUP]))
    return bytes(sink.getvalue())


def _record_batch(pa: Any, schema: Any, messages: Sequence[Message]) -> Any:
    columns = [
        [message.seq for message in messages],
        [message.time_ns for message in messages],
        [message.subject for message in messages],
        [json.dumps(dict(message.headers)) for message in messages],
        [message.data for message in messages],
    ]
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _reader(body: bytes, name: str) -> pa.parquet.ParquetFile:
    pa, parquet = _pyarrow()
    try:
        return parquet.ParquetFile(pa.BufferReader(body))
    except (pa.ArrowException, OSError) as exc:
        raise CorruptError(f"{name} is no Parquet file: {exc}", file=name) from exc


def _batches(body: bytes, name: str, *, prefix: str) -> Iterator[list[Message]]:
    pa, _ = _pyarrow()
    reader = _reader(body, name)
    said = json.loads((reader.schema_arrow.metadata or {}).get(b"tensorbus", b"{}"))
    if said.get("format") != FORMAT:
        raise CorruptError(f"{name} is no archive file of format {FORMAT}", file=name)
    if said.get("prefix") != prefix:
        raise InvalidArgumentError(f"{name} is of the log {said.get('prefix')!r}, not of {prefix!r}", file=name)
    try:
        for batch in reader.iter_batches(batch_size=BATCH):
            seqs, times, subjects, headers, bodies = (batch.column(at).to_pylist() for at in range(5))
            parsed = json.loads(f"[{','.join(headers)}]")  # at once: half the time of one by one
            yield list(starmap(Message, zip(seqs, times, subjects, parsed, bodies, strict=True)))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise CorruptError(f"{name} cannot be read: {exc}", file=name) from exc

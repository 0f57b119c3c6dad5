"""One stream in memory: sequences, compare-and-append, message ids, limits. No time of its own, no I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tensorbus.bus._port import LogInfo, Message, StreamLimits, WrongSequenceError
from tensorbus.errors import InvalidArgumentError, OutOfSpaceError, TensorbusError
from tensorbus.events import MSG_ID
from tensorbus.events._envelope import EXPECTED_FILTER, EXPECTED_SEQ

NS_PER_S: Final = 1_000_000_000
MESSAGE_OVERHEAD_BYTES: Final = 22


class Refused(Exception):
    """The stream does not store the message."""

    def __init__(self, error: TensorbusError) -> None:
        super().__init__(str(error))
        self.error = error


class MemoryStream:
    """The messages of a stream in order, with an index by subject and by all of the subject but its last token."""

    def __init__(
        self,
        filters: Iterable[str],
        *,
        first_seq: int,
        wall_ns: Callable[[], int],
        limits: StreamLimits,
        replicated: bool,
    ) -> None:
        self.limits = limits
        self.keeps_last_only = False
        self.last_seq = first_seq - 1
        self._filters = tuple(filters)
        self._wall_ns = wall_ns
        self._replicated = replicated
        self._messages: dict[int, Message] = {}
        self._seqs: list[int] = []
        self._by_subject: dict[str, list[int]] = {}
        self._by_parent: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, int]] = {}
        self._bytes = 0
        self._created_ns = 0  # set at the first use: a stream may be made where no loop gives the time yet

    def takes(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self._filters)

    def get(self, seq: int) -> Message | None:
        return self._messages.get(seq)

    def last_on(self, pattern: str) -> Message | None:
        last = max((seqs[-1] for seqs in self._matching(pattern)), default=None)
        return None if last is None else self._messages[last]

    def after(self, seq: int, pattern: str, *, count_max: int) -> list[Message]:
        """The next messages on a filter behind a sequence."""
        lists = self._matching(pattern) if _is_narrow(pattern) else [self._seqs]
        found: list[Message] = []
        for seqs in lists:
            for at in range(bisect_right(seqs, seq), len(seqs)):
                message = self._messages[seqs[at]]
                if matches(pattern, message.subject):
                    found.append(message)
                    if len(found) == count_max:
                        return found
        return found

    def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        """Store a message, or give the sequence of the first one with its id.

        Raises:
            Refused: If it is too large or the stream full.
            WrongSequenceError: If the expected last sequence does not hold.
        """
        if self._replicated and (known := self._known(headers)) is not None:
            return known
        self._check_expected(subject, headers)
        if (known := self._known(headers)) is not None:
            return known
        nbytes = _size(subject, data, headers)
        self._check_room(subject, nbytes)
        if self.keeps_last_only and subject in self._by_subject:
            self.remove(self._by_subject[subject][-1])
        seq = self.last_seq = self.last_seq + 1
        message = Message(seq, self._wall_ns(), subject, dict(headers), data)
        self._messages[seq] = message
        for seqs in (
            self._seqs,
            self._by_subject.setdefault(subject, []),
            self._by_parent.setdefault(_parent(subject), []),
        ):
            insort(seqs, seq)
        self._bytes += nbytes
        if MSG_ID in headers:
            self._ids[headers[MSG_ID]] = (seq, message.time_ns)
        return seq

    def remove(self, seq: int) -> bool:
        """Whether it was there."""
        message = self._messages.pop(seq, None)
        if message is None:
            return False
        self._bytes -= _size(message.subject, message.data, message.headers)
        _take_out(self._seqs, seq)
        for index, key in ((self._by_subject, message.subject), (self._by_parent, _parent(message.subject))):
            _take_out(index[key], seq)
            if not index[key]:
                del index[key]
        return True

    def purge(self, pattern: str, *, upto: int, keep_last: bool) -> int:
        """Remove what a filter has up to a sequence, but its last message; how many went."""
        last = self.last_on(pattern) if keep_last else None
        going = [message.seq for message in self.after(0, pattern, count_max=len(self._seqs) + 1)]
        going = [seq for seq in going if seq <= upto and (last is None or seq != last.seq)]
        for seq in going:
            self.remove(seq)
        return len(going)

    def truncate(self, last_seq: int) -> None:
        """Forget all that came after a sequence, as if it had never been."""
        for seq in [seq for seq in self._seqs if seq > last_seq]:
            self.remove(seq)
        self._ids = {key: known for key, known in self._ids.items() if known[0] <= last_seq}
        self.last_seq = min(self.last_seq, last_seq)

    def info(self) -> LogInfo:
        self._created_ns = self._created_ns or self._wall_ns()
        return LogInfo(
            first_seq=self._seqs[0] if self._seqs else self.last_seq + 1,
            last_seq=self.last_seq,
            messages=len(self._seqs),
            nbytes=self._bytes,
            created_ns=self._created_ns,
        )

    def _known(self, headers: Mapping[str, str]) -> int | None:
        known = self._ids.get(headers.get(MSG_ID, ""))
        if known is None or self._wall_ns() - known[1] > self.limits.dedup_s * NS_PER_S:
            return None
        return known[0]

    def _check_expected(self, subject: str, headers: Mapping[str, str]) -> None:
        if EXPECTED_SEQ not in headers:
            return
        expected = int(headers[EXPECTED_SEQ])
        last = self.last_on(headers.get(EXPECTED_FILTER, subject))
        found = 0 if last is None else last.seq
        if found != expected:
            raise WrongSequenceError(subject, seq=found, expected=expected)

    def _check_room(self, subject: str, nbytes: int) -> None:
        if nbytes > self.limits.message_bytes_max:
            raise Refused(InvalidArgumentError(f"{subject}: message size exceeds maximum allowed", nbytes=nbytes))
        if self._bytes + nbytes > self.limits.log_bytes_max:
            raise Refused(OutOfSpaceError("the bus is full: maximum bytes exceeded", subject=subject))

    def subjects_on(self, pattern: str) -> list[str]:
        """The subjects that a filter matches and that have messages."""
        return sorted(subject for subject, seqs in self._by_subject.items() if seqs and matches(pattern, subject))

    def _matching(self, pattern: str) -> list[list[int]]:
        if not _is_wild(pattern):
            return [seqs] if (seqs := self._by_subject.get(pattern)) else []
        parent = _parent(pattern)
        if pattern.endswith(".*") and not _is_wild(parent):
            return [seqs] if (seqs := self._by_parent.get(parent)) else []
        return [seqs for subject, seqs in self._by_subject.items() if matches(pattern, subject)]


def _size(subject: str, data: bytes, headers: Mapping[str, str]) -> int:
    return len(subject) + len(data) + sum(len(k) + len(v) + 4 for k, v in headers.items()) + MESSAGE_OVERHEAD_BYTES


def _take_out(seqs: list[int], seq: int) -> None:
    del seqs[bisect_left(seqs, seq)]


def _is_wild(pattern: str) -> bool:
    return "*" in pattern or pattern.endswith(">")


def _is_narrow(pattern: str) -> bool:
    """Whether one index list holds exactly its messages."""
    return not _is_wild(pattern) or (pattern.endswith(".*") and not _is_wild(_parent(pattern)))


def _parent(subject: str) -> str:
    return subject.rpartition(".")[0]


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is one of a filter: ``*`` stands for one token, a final ``>`` for one or more."""
    if not _is_wild(pattern):
        return pattern == subject
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))

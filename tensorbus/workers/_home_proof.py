"""Whether a home may answer: it can prove that its session is open, and knows which shards are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tensorbus.clock import Deadline
from tensorbus.feeds import LeaseFeed
from tensorbus.workers._core import Core
from tensorbus.workers._session import OwnSession

PROVE_S: Final = 10.0


class Proof:
    """Ends when no heartbeat was acknowledged for a whole TTL, and stays so until the grants were looked at again.

    A process that stood still may have a heartbeat acknowledged before it hears that its shards were taken.
    """

    def __init__(self, core: Core, leases: LeaseFeed) -> None:
        self._core = core
        self._leases = leases
        self._session: OwnSession | None = None
        self._proved = 0
        self._doubted = False

    def begin(self, session: OwnSession) -> None:
        """From now on the session counts."""
        self._session, self._proved = session, session.lapses

    @property
    def holds(self) -> bool:
        """Whether answers may be given."""
        session = self._session
        return session is not None and session.provably_alive and session.lapses == self._proved

    @property
    def heard(self) -> bool:
        """Whether a heartbeat was acknowledged lately, so that it can be proved again if it is not."""
        return self._session is not None and self._session.provably_alive

    def doubt(self) -> None:
        """The stream lost its tail: grants must be looked at again."""
        self._doubted = True

    async def lost(self, held: Mapping[int, int]) -> list[int]:
        """Prove it anew if need be; gives the shards that are not this home's any more.

        Args:
            held: Tokens by shard.

        Raises:
            DeadlineExceededError: If the bus does not answer in time.
        """
        session = self._session
        if session is None or (session.lapses == self._proved and not self._doubted):
            return []
        lapses, deadline = session.lapses, Deadline(PROVE_S, what="looking whose the shards are")
        await self._leases.fresh(deadline=deadline)
        await caught_up(self._core, deadline=deadline)
        grants = self._leases.leases
        gone = [shard for shard, token in held.items() if shard not in grants or grants[shard].token != token]
        self._doubted = False
        if self._core.state.is_live(self._core.me.worker, self._core.me.incarnation):
            self._proved = lapses
        return gone


async def caught_up(core: Core, *, deadline: Deadline) -> None:
    """Wait until the Directory knows all sessions that there are now."""
    await core.feed.reached(await core.bus.last_seq(deadline=deadline), deadline=deadline)

"""The role *shard-home*: takes the shards that are to be its own, serves them, and lets them go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from tensorbus.bus import Appended, append
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import ConflictError, DeniedError, FencedError, TensorbusError
from tensorbus.events import Headers, LeaseGranted, PageHolder
from tensorbus.feeds import LeaseFeed, PageLog, ShardGrant, replay_shard
from tensorbus.ids import Incarnation, WorkerId, new_event_id
from tensorbus.lifecycle import HomeStep, HomeView, Touched, assign, log_rules, next_step
from tensorbus.workers._core import Core
from tensorbus.workers._home_peers import HomePeers
from tensorbus.workers._home_proof import Proof, caught_up
from tensorbus.workers._home_shard import HomeShard
from tensorbus.workers._session import OwnSession

log = logging.getLogger("tensorbus.workers")

LOOK_S: Final = 0.25
GRANT_S: Final = 10.0
REPLAY_S: Final = 120.0
HAND_OVER_S: Final = 10.0
LEAVE_S: Final = 3.0
PATIENCE_S: Final = 1.0
"""How much longer each further candidate waits before it takes a shard that is nobody's."""
HANDED_S: Final = 5.0
"""How long a shard that was let go is left to whom it was let go for."""
ASK_AGAIN_S: Final = 1.0
AT_ONCE: Final = 8
"""Shards that are taken or replayed at the same time."""
SHARDS_AT_ONCE: Final = 256
ANY_NS: Final = 2**63

Life = tuple[WorkerId, Incarnation]


class HomeRole:
    """The shards that one worker is home of.

    Args:
        shards: Into how many the cluster's pages are divided, if that is not fixed yet.
        session: The worker's own: a home that cannot prove that it lives answers nothing.

    Attributes:
        serving: The shards that are served.
    """

    def __init__(self, core: Core, leases: LeaseFeed, peers: HomePeers, *, shards: int) -> None:
        self.serving: dict[int, HomeShard] = {}
        self._core = core
        self._leases = leases
        self._peers = peers
        self._shards_wanted = shards
        self._me: Life = (core.me.worker, core.me.incarnation)
        self._proof = Proof(core, leases)
        self._leaving = False
        self._tokens: dict[int, int] = {}
        self._logs: dict[int, asyncio.Task[None]] = {}
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._nobodys_ns: dict[int, int] = {}
        self._not_before_ns: dict[int, int] = {}
        self._trouble: TensorbusError | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._group: asyncio.TaskGroup | None = None
        self._homes: tuple[str, ...] = ()
        self._candidates: list[tuple[str, ...]] = []

    # -- what others see ----------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether this home can prove that its session is open, and that no shard was taken while it could not."""
        return self._proof.holds

    @property
    def rebuilding(self) -> list[int]:
        """Shards that are this home's and not served yet."""
        return sorted(self._tokens.keys() - self.serving.keys())

    def lease(self, shard: int) -> ShardGrant | None:
        """The grant in force, as far as this home knows."""
        return self._leases.leases.get(shard)

    def is_live(self, holder: PageHolder) -> bool:
        return self._core.state.is_live(holder.worker, holder.incarnation)

    def host_of(self, holder: PageHolder) -> str:
        session = self._core.state.sessions.get(holder.worker)
        return "" if session is None else session.host

    async def hand_over(self, shard: int, *, token: int, to: Life, deadline: Deadline) -> bool:
        """Let a shard go to the home that it is to be at; whether all that is known of it is on the stream then.

        Raises:
            ConflictError: If it is not served here under that token, or is not to be there as far as is known here.
        """
        home = self.serving.get(shard)
        if home is None or home.token != token or not self.alive:
            raise ConflictError(f"shard {shard} is not served here under token {token}", shard=shard, token=token)
        first = self._candidates_of(shard)[:1]
        if first != (to[0],) or not self._core.state.is_live(*to):
            raise ConflictError(
                f"shard {shard} is to be at {', '.join(first) or 'nobody'}, not at {to[0]}", shard=shard
            )
        self._not_before_ns[shard] = self._core.clock.now_ns() + int(HANDED_S * NS_PER_S)
        del self.serving[shard]
        try:
            await home.log.flush(deadline=deadline)
        except FencedError:
            return False
        except BaseException:
            if self._tokens.get(shard) == token:
                self.serving[shard] = home
            raise
        self._drop(shard)
        log.info("handed over: shard=%d to=%s pages=%d", shard, to[0], len(home.table))
        return not home.waiting

    # -- life ---------------------------------------------------------------------------------------------------------

    def begin(self, session: OwnSession) -> None:
        """From now on the session counts."""
        self._proof.begin(session)

    def work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The endless tasks of the role."""
        return [("home", self.run())]

    async def run(self) -> None:
        """Take, serve and let go of shards for ever.

        Raises:
            FencedError: If the session is over; DeniedError: If the bus does not permit what a home does.
        """
        try:
            with self._following():
                async with asyncio.TaskGroup() as group:
                    await self._look(group)
        except* TensorbusError as failed:
            raise failed.exceptions[0] from None

    async def _look(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        while True:
            self._wake.clear()
            try:
                await self._turn()
            except (FencedError, DeniedError):
                raise
            except TensorbusError as error:
                self._troubled(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    async def leave(self, *, deadline: Deadline) -> None:
        """The worker stops: no shard is served any more, and all that is known of them is on the stream.

        Raises:
            DeadlineExceededError: If the bus does not take it in time.
        """
        self._leaving = True
        homes, self.serving = list(self.serving.values()), {}
        for home in homes:
            with contextlib.suppress(FencedError):
                await home.log.flush(deadline=deadline)

    @contextmanager
    def _following(self) -> Iterator[None]:
        with self._leases.followed(self._on_leases), self._core.live.followed(self._on_change):
            yield

    def _on_leases(self, changed: tuple[ShardGrant, ...]) -> None:
        if not changed:
            self._proof.doubt()
        for lease in changed:
            if 0 < self._tokens.get(lease.shard, 0) < lease.token:
                log.warning(
                    "lost: shard=%d token=%d in_force=%d holder=%s",
                    lease.shard, self._tokens[lease.shard], lease.token, lease.holder,
                )  # fmt: skip
                self._drop(lease.shard)
        self._wake.set()

    def _on_change(self, _position: int, touched: tuple[Touched, ...]) -> None:
        if any(one.kind in ("session", "cluster") for one in touched):
            self._wake.set()

    # -- one look -----------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        state = self._core.state
        if self._leaving or not self._proof.heard or not state.is_live(*self._me):
            return
        if not state.shards:
            rule = partial(log_rules.fix_shards, shards=self._shards_wanted)
            await self._core.author.decide(rule, deadline=Deadline(GRANT_S, what="fixing the number of shards"))
        for shard in await self._proof.lost(self._tokens):
            self._drop(shard)
        self._assign()
        self._bury()
        for shard in range(state.shards):
            if shard not in self._busy:
                self._step(shard)
            if shard % SHARDS_AT_ONCE == SHARDS_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _assign(self) -> None:
        homes = tuple(sorted(one.worker for one in self._core.state.live_sessions() if "shard-home" in one.roles))
        if homes != self._homes or len(self._candidates) != self._core.state.shards:
            self._homes, self._candidates = homes, assign(self._core.state.shards, homes)

    def _candidates_of(self, shard: int) -> tuple[str, ...]:
        self._assign()
        return self._candidates[shard]

    def _bury(self) -> None:
        """Forget what is held by lives that are over; after a loss of the log they may yet say that they are not."""
        if self._core.feed.unsure or self._core.unsettled:
            return
        for home in [home for home in self.serving.values() if home.takes]:
            for holder in home.holders():
                if not self.is_live(holder):
                    home.forget_holder(holder)

    def _step(self, shard: int) -> None:
        lease, now_ns = self._leases.leases.get(shard), self._core.clock.now_ns()
        holder = None if lease is None else (lease.holder, lease.incarnation)
        if holder is not None and self._core.state.is_live(*holder):
            self._nobodys_ns.pop(shard, None)
        else:
            self._nobodys_ns.setdefault(shard, now_ns)
        view = HomeView(
            holder=holder,
            token=0 if lease is None else lease.token,
            serves=self._tokens.get(shard, 0),
            candidates=self._candidates[shard],
            waited_s=(now_ns - self._nobodys_ns.get(shard, now_ns)) / NS_PER_S,
        )
        step = next_step(view, me=self._me, is_live=self._core.state.is_live, patience_s=PATIENCE_S)
        if step is HomeStep.DROP:
            self._drop(shard)
        elif step is not HomeStep.NONE and now_ns >= self._not_before_ns.get(shard, 0):
            self._start(shard, step, lease)

    def _start(self, shard: int, step: HomeStep, lease: ShardGrant | None) -> None:
        match step:
            case HomeStep.TAKE:
                work = self._take(shard, lease)
            case HomeStep.ASK:
                assert lease is not None
                work = self._ask(shard, lease)
            case _:
                assert lease is not None
                work = self._serve(shard, lease.token, opened_before_ns=ANY_NS)
        assert self._group is not None
        task = self._group.create_task(self._one(shard, work), name=f"{step} shard {shard}")
        self._busy[shard] = task

    async def _one(self, shard: int, work: Coroutine[Any, Any, None]) -> None:
        """The edge of what is done about one shard."""
        try:
            async with self._room:
                await work
            self._trouble = None
        except DeniedError:
            raise
        except FencedError as error:
            log.info("shard is another's: shard=%d reason=%s", shard, error)
        except TensorbusError as error:
            self._troubled(error)
            self._drop(shard)
            self._not_before_ns[shard] = self._core.clock.now_ns() + int(ASK_AGAIN_S * NS_PER_S)
        finally:
            work.close()
            del self._busy[shard]
            self._wake.set()

    def _troubled(self, error: TensorbusError) -> None:
        """Say it once: all shards have the same trouble, and have it again at each try."""
        if self._trouble is None or error.kind != self._trouble.kind:
            log.warning("shards cannot be taken: worker=%s reason=%s", self._me[0], error)
        self._trouble = error

    # -- one shard ----------------------------------------------------------------------------------------------------

    async def _take(self, shard: int, lease: ShardGrant | None) -> None:
        """Propose a grant of a shard that is nobody's."""
        if lease is not None:
            # A grant may be known before the session in which it was given.
            await caught_up(self._core, deadline=Deadline(GRANT_S, what="reading the log"))
            if self._core.state.is_live(lease.holder, lease.incarnation):
                return
        token = await self._grant(shard, lease)
        if token is not None:
            await self._serve(shard, token, opened_before_ns=ANY_NS if lease is not None else await self._made_ns())

    async def _ask(self, shard: int, lease: ShardGrant) -> None:
        """Have the shard handed over by the living home that has it, and take it."""
        exact = await self._peers.hand_over(
            (lease.holder, lease.incarnation),
            shard=shard,
            token=lease.token,
            to=self._me,
            deadline=Deadline(HAND_OVER_S, what=f"the hand-over of shard {shard}"),
        )
        token = await self._grant(shard, lease)
        if token is not None:
            await self._serve(shard, token, opened_before_ns=0 if exact else ANY_NS)

    async def _grant(self, shard: int, lease: ShardGrant | None) -> int | None:
        headers = Headers(
            event_id=new_event_id(self._core.ids),
            author=self._me[0],
            incarnation=self._me[1],
            expected=0 if lease is None else lease.token,
        )
        deadline = Deadline(GRANT_S, what=f"the grant of shard {shard}")
        outcome = await append(self._core.bus.pages, LeaseGranted(shard=shard), headers, deadline=deadline)
        if isinstance(outcome, Appended):
            return outcome.seq
        await self._leases.reached(outcome.seq, deadline=deadline)
        return None

    async def _made_ns(self) -> int:
        """When the stream was made. A shard without a grant was never had, or the stream lost all that it had."""
        state = await self._core.bus.pages.log_state(deadline=Deadline(GRANT_S, what="looking at the stream of pages"))
        return state.created_ns

    async def _serve(self, shard: int, token: int, *, opened_before_ns: int) -> None:
        """Replay a shard that was granted, and answer for it.

        Args:
            opened_before_ns: Workers of a session older than this may hold pages that the stream does not have.
        """
        started_ns = self._core.clock.now_ns()
        self._tokens[shard] = token
        deadline = Deadline(REPLAY_S, what=f"the replay of shard {shard}")
        state = await replay_shard(self._core.bus.pages, shard, upto=token, deadline=deadline)
        await caught_up(self._core, deadline=deadline)
        if not state.holds(*self._me, token) or self._tokens.get(shard) != token or self._leaving:
            return
        voice = PageLog(
            self._core.bus.pages,
            shard=shard,
            token=token,
            number=state.number,
            author=self._me[0],
            incarnation=self._me[1],
            ids=self._core.ids,
            on_fenced=partial(self._fenced, shard, token),
        )
        home = HomeShard(
            shard=shard,
            token=token,
            table=state.pages,
            log=voice,
            stored=0 if state.snapshot is None else state.number,
            waiting=self._holders(opened_before_ns),
            clock=self._core.clock,
            is_live=self.is_live,
            host_of=self.host_of,
        )
        assert self._group is not None
        self._logs[shard] = self._group.create_task(voice.run(), name=f"say shard {shard}")
        self.serving[shard] = home
        spent_ms = (self._core.clock.now_ns() - started_ns) // 1_000_000
        log.info("serving: shard=%d token=%d pages=%d after_ms=%d", shard, token, len(home.table), spent_ms)

    def _holders(self, opened_before_ns: int) -> set[PageHolder]:
        """The lives that may hold pages, of those that were opened before."""
        return {
            PageHolder(worker=one.worker, incarnation=Incarnation(one.incarnation))
            for one in self._core.state.live_sessions()
            if "basic" in one.roles and one.opened_ns < opened_before_ns
        }

    def _fenced(self, shard: int, token: int) -> None:
        if self._tokens.get(shard) == token:
            self._drop(shard)
            self._wake.set()

    def _drop(self, shard: int) -> None:
        """The shard is not served any more."""
        self.serving.pop(shard, None)
        self._tokens.pop(shard, None)
        task = self._logs.pop(shard, None)
        if task is not None:
            task.cancel()

"""Which way bytes come: negotiated, with fallback inside the deadline, and told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    ExpiredError,
    InvalidArgumentError,
    NotFoundError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.testing._device_child import content, pattern
from tensorbus.testing._device_contract import filled
from tensorbus.transport import (
    DeviceBuffer,
    DeviceRoute,
    DeviceServing,
    Fds,
    Grant,
    HostDevice,
    Room,
    RouteReader,
    RouteSource,
    Span,
    bring,
    choose,
    offers_of,
)
from tests.unit.transport.fake_cuda import FakeCuda

SPANS: Sequence[Span] = ((0, 2), (3, 1))
DATA = b"abcdef"


@dataclass
class Way:
    """A route over memory of the test's, which fails as it is told."""

    name: str
    refusal: str | None = None
    error: TensorbusError | None = None
    hangs: bool = False
    serves: bool = True
    log: list[str] = field(default_factory=list)

    def offer(self) -> Mapping[str, object] | None:
        return {"port": 1} if self.serves else None

    def refuses(self, offer: Mapping[str, object], room: Room) -> str | None:
        return self.refusal

    def open(self, grant: Grant, *, deadline: Deadline) -> RouteReader:
        self.log.append(f"open {grant.header['route']}")
        return self

    def read(self, spans: Sequence[Span], room: Room, *, deadline: Deadline) -> None:
        if self.hangs:
            threading.Event().wait(deadline.left())
            raise deadline.error()
        if self.error is not None:
            raise self.error
        assert isinstance(room, memoryview)
        for at, size in spans:
            room[at : at + size] = DATA[at : at + size]

    def close(self) -> None:
        self.log.append("close")


def source(*routes: Way, **offers: Mapping[str, object]) -> RouteSource:
    return RouteSource("w2", {**offers_of(routes), **offers}, lambda name, deadline: Grant({"route": name}))


def room() -> bytearray:
    return bytearray(b"......")


def test_the_first_that_both_can_is_taken() -> None:
    first, second, third = Way("cuda_ipc", serves=False), Way("rdma", refusal="no device"), Way("tcp")
    choice = choose([first, second, third], offers_of([first, second, third, Way("new")]), memoryview(b""))
    assert choice.usable == (third,)
    assert choice.refused == {
        "cuda_ipc": "the source does not offer it",
        "rdma": "no device",
        "new": "this process does not know it",
    }


def test_spans_come_and_the_report_says_how() -> None:
    way, target = Way("tcp"), room()
    report = bring([way], source(way), SPANS, memoryview(target), deadline=Deadline(5))
    assert bytes(target) == b"ab.d.."
    assert (report.path, report.why, report.sources, report.nbytes, report.retries) == (
        "tcp", "the first choice", {"w2": 3}, 3, 0,
    )  # fmt: skip
    assert way.log == ["open tcp", "close"]


@pytest.mark.parametrize(
    "error", [UnavailableError("cut"), ExpiredError("freed"), CorruptError("flipped"), NotFoundError("gone")]
)
def test_a_route_that_fails_leads_to_the_next(error: TensorbusError) -> None:
    bad, good, target = Way("rdma", error=error), Way("tcp"), room()
    report = bring([bad, good], source(bad, good), SPANS, memoryview(target), deadline=Deadline(5))
    assert (report.path, report.retries) == ("tcp", 1)
    assert report.why == f"not rdma: {error}"
    assert bad.log == ["open rdma", "close"]


def test_a_route_that_hangs_leaves_time_for_the_next() -> None:
    slow, good = Way("rdma", hangs=True), Way("tcp")
    report = bring([slow, good], source(slow, good), SPANS, memoryview(room()), deadline=Deadline(0.4))
    assert report.path == "tcp"
    with pytest.raises(DeadlineExceededError):
        bring([slow], source(slow), SPANS, memoryview(room()), deadline=Deadline(0.05))


def test_what_no_other_route_can_mend_is_raised() -> None:
    bad, good = Way("rdma", error=InvalidArgumentError("no such span")), Way("tcp")
    with pytest.raises(InvalidArgumentError):
        bring([bad, good], source(bad, good), SPANS, memoryview(room()), deadline=Deadline(5))
    assert good.log == []
    assert bad.log[-1] == "close"


def test_when_all_fail_it_is_said_how() -> None:
    one, two = Way("rdma", error=CorruptError("flipped")), Way("tcp", error=CorruptError("torn"))
    with pytest.raises(CorruptError, match=r"w2: not rdma: flipped; not tcp: torn"):
        bring([one, two], source(one, two), SPANS, memoryview(room()), deadline=Deadline(5))
    two.error = NotFoundError("gone")
    with pytest.raises(UnavailableError):
        bring([one, two], source(one, two), SPANS, memoryview(room()), deadline=Deadline(5))
    with pytest.raises(UnavailableError, match="not rdma: this process does not know it"):
        bring([], source(one), SPANS, memoryview(room()), deadline=Deadline(5))
    with pytest.raises(UnavailableError, match="there is no route"):
        bring([], source(), SPANS, memoryview(room()), deadline=Deadline(5))


# -- the route over device memory -------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    device.close()


def owner_of(serving: DeviceServing, device: HostDevice, buffer: DeviceBuffer) -> RouteSource:
    return RouteSource("w2", offers_of([DeviceRoute(device)]), lambda name, deadline: serving.grant(buffer))


def test_spans_of_device_memory_come_to_the_host_and_to_the_device(device: HostDevice) -> None:
    serving, buffer, spans = DeviceServing(device), filled(device, 1000), ((10, 90), (500, 500), (7, 0))
    expected = np.zeros(1000, np.uint8)
    for at, size in spans:
        expected[at : at + size] = pattern(1000, 1)[at : at + size]
    there, here = device.allocate(1000, tenant="t"), bytearray(1000)
    device.upload(bytes(1000), there)
    route = DeviceRoute(device)
    for target in (there, memoryview(here)):
        report = bring([route], owner_of(serving, device, buffer), spans, target, deadline=Deadline(5))
        assert (report.path, report.nbytes) == ("host_map", 590)
    assert np.array_equal(content(device, there), expected)
    assert bytes(here) == expected.tobytes()
    assert serving.readers(buffer) == 0
    device.free(buffer)


def test_memory_that_is_read_is_not_freed(device: HostDevice) -> None:
    serving, buffer, route = DeviceServing(device), filled(device, 1000), DeviceRoute(device)
    one, two = (route.open(serving.grant(buffer), deadline=Deadline(5)) for _ in range(2))
    assert serving.readers(buffer) == 2
    one.close()
    one.close()
    assert serving.readers(buffer) == 1
    with pytest.raises(ConflictError):
        device.free(buffer)
    assert np.array_equal(content(device, two.buffer), pattern(1000, 1))
    two.close()
    assert serving.readers(buffer) == 0
    device.free(buffer)


def test_a_grant_that_nobody_took_pins_nothing(device: HostDevice) -> None:
    serving, buffer = DeviceServing(device), filled(device, 1000)
    serving.grant(buffer).fds.close()
    assert serving.readers(buffer) == 0
    device.free(buffer)
    with pytest.raises(ExpiredError):
        serving.grant(buffer)
    serving.close()
    serving.close()


def test_a_grant_that_lacks_something_is_refused(device: HostDevice) -> None:
    route = DeviceRoute(device)
    with pytest.raises(CorruptError):
        route.open(Grant({}), deadline=Deadline(5))
    serving, buffer = DeviceServing(device), filled(device, 10)
    grant = serving.grant(buffer)
    with pytest.raises(CorruptError):
        route.open(Grant({"device": 1}, Fds(grant.fds.take())), deadline=Deadline(5))
    assert serving.readers(buffer) == 0


@pytest.mark.parametrize("span", [(0, 1001), (-1, 2), (999, 2), (0, -1)])
def test_spans_must_be_within_the_room(device: HostDevice, span: Span) -> None:
    serving, buffer = DeviceServing(device), filled(device, 2000)
    for target in (memoryview(bytearray(1000)), device.allocate(1000, tenant="t")):
        with pytest.raises(InvalidArgumentError):
            bring([DeviceRoute(device)], owner_of(serving, device, buffer), [span], target, deadline=Deadline(5))
    assert serving.readers(buffer) == 0


def test_memory_of_another_device_is_not_offered_as_ones_own(device: HostDevice) -> None:
    from tensorbus.transport import CudaDevice

    cuda = CudaDevice(0, runtime=FakeCuda())
    route, other = DeviceRoute(cuda), cuda.allocate(10, tenant="t")
    assert route.name == "cuda_ipc"
    assert "and this is cuda:" in str(route.refuses({"device": "cuda:ff@0000:02:00.0"}, memoryview(b"")))
    assert "go to host" in str(route.refuses(route.offer() or {}, filled(device, 10)))
    assert route.refuses(route.offer() or {}, other) is None
    cuda.close()

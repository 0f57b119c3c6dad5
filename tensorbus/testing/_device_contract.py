"""What every device must do. A backend subclasses :class:`DeviceContract` and gives the fixture ``device``.

One that other processes have too is also a :class:`NeighbourContract`.

Imports pytest, so only tests import this module.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3

from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeniedError,
    ExpiredError,
    InvalidArgumentError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.testing._device_child import Neighbour, content, pattern
from tensorbus.transport import Device, DeviceBuffer, DeviceExport, DeviceServing, DeviceStream, HostDevice

SIZES = (0, 1, 4095, 65_536, 3_000_001)
STREAMS = 3


def filled(device: Device, nbytes: int = 10_000, *, seed: int = 1, tenant: str = "t") -> DeviceBuffer:
    buffer = device.allocate(nbytes, tenant=tenant)
    device.upload(pattern(nbytes, seed), buffer)
    return buffer


def holds(device: Device, buffer: DeviceBuffer, expected: npt.NDArray[np.uint8]) -> bool:
    return bool(np.array_equal(content(device, buffer), expected))


class DeviceContract:
    """Tests that the host's memory and a GPU's both pass."""

    # ------------------------------------------------------------------------------------------------------ memory

    def test_a_device_says_what_it_is(self, device: Device) -> None:
        assert device.name
        assert device.identity.startswith(device.name.partition(":")[0])
        assert device.description
        assert 0 < device.free_bytes() <= device.capacity_bytes

    def test_buffers_have_memory_of_their_own(self, device: Device) -> None:
        buffers = [filled(device, size, seed=number) for number, size in enumerate(SIZES)]
        ranges = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in buffers if buffer.nbytes)
        assert all(low[1] <= high[0] for low, high in pairwise(ranges))
        assert all(holds(device, buffer, pattern(buffer.nbytes, number)) for number, buffer in enumerate(buffers))
        for buffer in buffers:
            device.free(buffer)

    def test_memory_that_is_not_there_is_an_error_that_says_who_holds_it(self, device: Device) -> None:
        kept = device.allocate(1 << 20, tenant="a")
        with pytest.raises(OutOfSpaceError) as caught:
            device.allocate(device.capacity_bytes + (1 << 30), tenant="b")
        assert caught.value.details["held_bytes"] == {"a": 1 << 20}
        assert isinstance(caught.value.details["free_bytes"], int)
        device.free(kept)
        device.free(device.allocate(1 << 20, tenant="b"))

    def test_a_negative_size_is_refused(self, device: Device) -> None:
        with pytest.raises(InvalidArgumentError):
            device.allocate(-1, tenant="t")

    def test_a_tenant_never_sees_what_another_one_wrote(self, device: Device) -> None:
        for nbytes in (5000, 3 << 20, 3 << 20):
            for tenant in ("a", "b", "a"):
                buffer = device.allocate(nbytes, tenant=tenant)
                secret = ord("b") if tenant == "a" else ord("a")
                assert secret not in content(device, buffer)
                device.upload(np.full(nbytes, ord(tenant), np.uint8), buffer)
                device.free(buffer)

    def test_what_was_freed_is_gone(self, device: Device) -> None:
        buffer, other = filled(device), filled(device)
        device.free(buffer)
        calls: list[Callable[[], object]] = [
            lambda: device.free(buffer),
            lambda: device.upload(b"x", buffer),
            lambda: device.download(buffer, bytearray(1)),
            lambda: device.copy(buffer, other, nbytes=1),
            lambda: device.copy(other, buffer, nbytes=1),
            lambda: device.export(buffer),
        ]
        for call in calls:
            with pytest.raises(ExpiredError):
                call()
        assert holds(device, other, pattern(10_000, 1))

    def test_a_buffer_of_another_device_is_refused(self, device: Device) -> None:
        stranger = HostDevice()
        foreign, own = filled(stranger), filled(device)
        with pytest.raises(InvalidArgumentError):
            device.copy(foreign, own, nbytes=1)
        with pytest.raises(InvalidArgumentError):
            device.free(foreign)
        with stranger.stream() as stream, pytest.raises(InvalidArgumentError):
            device.upload(b"x", own, stream=stream)
        stranger.close()

    # ------------------------------------------------------------------------------------------------------ copies

    @pytest.mark.parametrize("nbytes", SIZES)
    @pytest.mark.parametrize("locked", [False, True])
    def test_what_goes_up_comes_down(self, device: Device, nbytes: int, locked: bool) -> None:
        data, room = pattern(nbytes, 7), bytearray(nbytes)
        buffer = device.allocate(nbytes + 13, tenant="t")
        locks = [device.lock(data), device.lock(room)] if locked and nbytes else []
        device.upload(data, buffer, offset=13)
        device.download(buffer, room, offset=13)
        assert bytes(room) == data.tobytes()
        for lock in locks:
            lock.release()
            lock.release()

    def test_read_only_sources_and_views_are_taken(self, device: Device) -> None:
        buffer = device.allocate(8, tenant="t")
        device.upload(b"abcd", buffer)
        device.upload(memoryview(b"0123456789")[2:6], buffer, offset=4)
        assert content(device, buffer).tobytes() == b"abcd2345"

    def test_a_part_is_copied_within_the_device(self, device: Device) -> None:
        source, target = filled(device, 1000, seed=1), filled(device, 500, seed=2)
        device.copy(source, target, nbytes=300, source_offset=600, target_offset=100)
        expected = pattern(500, 2)
        expected[100:400] = pattern(1000, 1)[600:900]
        assert holds(device, target, expected)
        device.copy(source, source, nbytes=500, target_offset=500)
        assert holds(device, source, np.tile(pattern(1000, 1)[:500], 2))

    def test_ranges_must_be_within_their_buffers_and_apart(self, device: Device) -> None:
        source, target = filled(device, 100), filled(device, 50)
        calls: list[Callable[[], object]] = [
            lambda: device.upload(bytes(51), target),
            lambda: device.upload(b"x", target, offset=50),
            lambda: device.upload(b"x", target, offset=-1),
            lambda: device.download(target, bytearray(10), offset=41),
            lambda: device.copy(source, target, nbytes=51),
            lambda: device.copy(source, target, nbytes=-1),
            lambda: device.copy(source, target, nbytes=10, source_offset=91),
            lambda: device.copy(source, source, nbytes=10, source_offset=9),
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                call()
        assert holds(device, target, pattern(50, 1))

    def test_host_memory_must_be_contiguous_and_what_is_filled_writable(self, device: Device) -> None:
        buffer = filled(device, 10)
        with pytest.raises(InvalidArgumentError):
            device.upload(np.zeros(20, np.uint8)[::2], buffer)
        with pytest.raises(InvalidArgumentError):
            device.download(buffer, bytes(10))

    def test_copies_of_one_stream_happen_in_their_order(self, device: Device) -> None:
        first, second, room = filled(device, 5000, seed=1), filled(device, 5000, seed=2), bytearray(5000)
        with device.stream() as stream:
            device.upload(pattern(5000, 3), first, stream=stream)
            device.copy(first, second, nbytes=5000, stream=stream)
            device.upload(pattern(5000, 4), first, stream=stream)
            device.download(second, room, stream=stream)
            stream.synchronize()
            assert stream.done()
        assert bytes(room) == pattern(5000, 3).tobytes()
        assert holds(device, first, pattern(5000, 4))

    def test_a_stream_waits_for_another(self, device: Device) -> None:
        source, target = filled(device, 5000, seed=1), filled(device, 5000, seed=2)
        with device.stream() as up, device.stream() as within:
            for seed in range(3, 8):
                device.upload(pattern(5000, seed), source, stream=up)
                within.after(up)
                device.copy(source, target, nbytes=5000, stream=within)
                up.after(within)
            within.synchronize()
            assert holds(device, target, pattern(5000, 7))

    def test_a_stream_says_when_it_is_done(self, device: Device) -> None:
        buffer, data = device.allocate(1 << 20, tenant="t"), pattern(1 << 20, 1)
        with device.stream() as stream, device.lock(data):
            assert stream.done()
            device.upload(data, buffer, stream=stream)
            stream.synchronize()
            assert stream.done()

    def test_a_closed_stream_is_not_used(self, device: Device) -> None:
        buffer, stream = filled(device, 10), device.stream()
        stream.close()
        stream.close()
        calls: list[Callable[[], object]] = [
            lambda: device.upload(b"x", buffer, stream=stream),
            stream.synchronize,
            stream.done,
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                call()

    def test_freeing_waits_for_copies(self, device: Device) -> None:
        with device.stream() as stream:
            for seed in range(5):
                data = pattern(3 << 20, seed)
                target = filled(device, 3 << 20, seed=99)
                source = filled(device, 3 << 20, seed=seed)
                device.copy(source, target, nbytes=3 << 20, stream=stream)
                device.free(source)
                again = filled(device, 3 << 20, seed=50)
                stream.synchronize()
                assert holds(device, target, data)
                device.free(again)
                device.free(target)

    @pytest.mark.parametrize("seed", range(6))
    def test_any_copies_on_any_streams_leave_what_a_model_says(self, device: Device, seed: int) -> None:
        random, size = np.random.default_rng(seed), 300_000
        model = [pattern(size, number) for number in range(STREAMS)]
        buffers = [filled(device, size, seed=number) for number in range(STREAMS)]
        streams: list[DeviceStream] = [device.stream() for _ in range(STREAMS)]
        shared = random.integers(0, 256, size, dtype=np.uint8)
        with device.lock(shared):
            for _ in range(60):
                one, two = (int(number) for number in random.choice(STREAMS, 2, replace=False))
                nbytes = int(random.integers(0, size // 2))
                here, there = (int(at) for at in random.integers(0, size // 2, 2))
                streams[one].after(streams[two])
                match int(random.integers(4)):
                    case 0:
                        data = random.integers(0, 256, nbytes, dtype=np.uint8)
                        device.upload(data, buffers[one], offset=here, stream=streams[one])
                        model[one][here : here + nbytes] = data
                    case 1:
                        part = shared[there : there + nbytes]
                        device.upload(part, buffers[one], offset=here, stream=streams[one])
                        model[one][here : here + nbytes] = part
                    case 2:
                        device.copy(
                            buffers[two], buffers[one], nbytes=nbytes, source_offset=there, target_offset=here,
                            stream=streams[one],
                        )  # fmt: skip
                        model[one][here : here + nbytes] = model[two][there : there + nbytes]
                    case _:
                        room = np.zeros(nbytes, np.uint8)
                        device.download(buffers[one], room, offset=here, stream=streams[one])
                        streams[one].synchronize()
                        assert np.array_equal(room, model[one][here : here + nbytes])
                streams[two].after(streams[one])
            device.synchronize()
            assert all(holds(device, buffer, expected) for buffer, expected in zip(buffers, model, strict=True))
        for stream in streams:
            stream.close()

    def test_threads_do_not_disturb_each_other(self, device: Device) -> None:
        wrong: list[object] = []

        def work(number: int) -> None:
            try:
                for round_ in range(5):
                    buffer = filled(device, 200_000 + number, seed=number + round_)
                    if not holds(device, buffer, pattern(200_000 + number, number + round_)):
                        wrong.append(number)
                    device.free(buffer)
            except BaseException as exc:  # noqa: BLE001 - told in the thread that waits
                wrong.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    # ----------------------------------------------------------------------------------------------------- exports

    def test_its_own_process_opens_an_export_as_the_memory_itself(self, device: Device) -> None:
        buffer = filled(device, 70_000)
        opened = device.open(device.export(buffer))
        assert opened.imported
        assert opened.owner is buffer
        assert holds(device, opened, pattern(70_000, 1))
        device.upload(b"new", buffer)
        assert content(device, opened)[:3].tobytes() == b"new"
        device.free(opened)
        assert content(device, buffer)[:3].tobytes() == b"new"

    def test_an_imported_buffer_is_only_for_reading(self, device: Device) -> None:
        buffer, target = filled(device, 100), device.allocate(100, tenant="t")
        opened = device.open(device.export(buffer))
        device.copy(opened, target, nbytes=100)
        calls: list[Callable[[], object]] = [
            lambda: device.upload(b"x", opened),
            lambda: device.copy(target, opened, nbytes=1),
            lambda: device.export(opened),
        ]
        for call in calls:
            with pytest.raises(DeniedError):
                call()
        assert holds(device, buffer, pattern(100, 1))
        assert holds(device, target, pattern(100, 1))

    def test_exported_memory_is_not_freed_before_it_is_withdrawn(self, device: Device) -> None:
        buffer = filled(device, 100)
        opened = device.open(device.export(buffer))
        with pytest.raises(ConflictError):
            device.free(buffer)
        assert holds(device, opened, pattern(100, 1))
        device.withdraw(buffer)
        device.free(buffer)
        with pytest.raises(ExpiredError):
            content(device, opened)
        device.free(opened)

    def test_an_export_of_what_was_freed_does_not_open(self, device: Device) -> None:
        buffer = filled(device, 100)
        export = device.export(buffer)
        device.withdraw(buffer)
        device.free(buffer)
        with pytest.raises(ExpiredError):
            device.open(export)
        assert not len(export.fds)

    def test_an_export_of_another_device_is_refused(self, device: Device) -> None:
        buffer = filled(device, 100)
        export = device.export(buffer)
        other = DeviceExport(
            device="other:1", process=export.process, serial=export.serial, nbytes=100, handle=export.handle,
            fds=export.fds,
        )  # fmt: skip
        with pytest.raises(UnavailableError):
            device.open(other)
        assert not len(other.fds)

    def test_an_export_that_lacks_something_is_refused(self, device: Device) -> None:
        good = device.export(filled(device, 100))
        good.fds.close()
        bad = DeviceExport(device=device.identity, process="elsewhere", serial=1, nbytes=100)
        with pytest.raises(CorruptError):
            device.open(bad)

    def test_a_header_travels_and_a_wrong_one_is_refused(self, device: Device) -> None:
        export = device.export(filled(device, 100))
        header = export.header()
        again = DeviceExport.from_header(header, export.fds.take())
        assert again == export
        opened = device.open(again)
        assert holds(device, opened, pattern(100, 1))
        for change in (
            {"nbytes": -1}, {"nbytes": True}, {"nbytes": "1"}, {"serial": None}, {"handle": "xy"}, {"handle": 1},
            {"handle": "00" * 300}, {"device": 1}, {"process": None}, {"nbytes": 1 << 63},
        ):  # fmt: skip
            with pytest.raises(CorruptError):
                DeviceExport.from_header({**header, **change})

    # --------------------------------------------------------------------------------------------------------- end

    def test_nothing_piles_up(self, device: Device) -> None:
        def round_() -> None:
            buffer = filled(device, 5000)
            with device.stream() as stream:
                device.copy(buffer, opened := device.allocate(5000, tenant="t"), nbytes=5000, stream=stream)
            alias = device.open(device.export(buffer))
            device.free(alias)
            device.free(opened)
            device.withdraw(buffer)
            device.free(buffer)

        round_()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            round_()
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_a_closed_device_says_so(self, device: Device) -> None:
        buffer, stream = filled(device), device.stream()
        export = device.export(buffer)
        device.close()
        device.close()
        calls: list[Callable[[], object]] = [
            device.free_bytes,
            device.synchronize,
            device.stream,
            lambda: device.allocate(1, tenant="t"),
            lambda: device.open(export),
            lambda: device.upload(b"x", buffer),
        ]
        for call in calls:
            with pytest.raises(UnavailableError):
                call()
        stream.close()
        export.fds.close()


class NeighbourContract:
    """Tests of exports between processes, for a backend that has the device in both of them."""

    neighbour_device: str
    """Its name in the other process."""

    @pytest.fixture
    def neighbour(self) -> Iterator[Neighbour]:
        with Neighbour(self.neighbour_device) as neighbour:
            yield neighbour

    def test_another_process_reads_an_export(self, device: Device, neighbour: Neighbour) -> None:
        for nbytes in (1, 5000, 5_000_000):
            buffer = filled(device, nbytes, seed=nbytes)
            digest = blake3(pattern(nbytes, nbytes).data).hexdigest()
            assert neighbour.read(device.export(buffer)) == digest
            assert neighbour.read(device.export(buffer)) == digest
            neighbour.let_go()
            device.withdraw(buffer)
            device.free(buffer)

    def test_another_process_cannot_write_to_an_export(self, device: Device, neighbour: Neighbour) -> None:
        buffer = filled(device, 5000)
        with pytest.raises(DeniedError):
            neighbour.write(device.export(buffer))
        assert holds(device, buffer, pattern(5000, 1))

    def test_a_reader_that_is_killed_harms_nobody(self, device: Device, neighbour: Neighbour) -> None:
        buffer = filled(device, 5000)
        neighbour.read(device.export(buffer))
        neighbour.kill()
        assert holds(device, buffer, pattern(5000, 1))
        device.withdraw(buffer)
        device.free(buffer)

    def test_what_another_process_exported_is_read_here(self, device: Device, neighbour: Neighbour) -> None:
        opened = device.open(neighbour.export(300_000, 5))
        assert opened.imported
        assert opened.owner is None
        assert holds(device, opened, pattern(300_000, 5))
        device.free(opened)

    def test_when_the_exporter_is_gone_its_memory_is_there_or_it_is_said(
        self, device: Device, neighbour: Neighbour
    ) -> None:
        export = neighbour.export(5000, 5)
        if device.exports_outlive:
            opened = device.open(export)
            neighbour.kill()
            assert holds(device, opened, pattern(5000, 5))
            device.free(opened)
        else:
            neighbour.kill()
            with pytest.raises(ExpiredError):
                device.open(export)

    def test_readers_count_until_they_let_go_or_are_killed(self, device: Device, neighbour: Neighbour) -> None:
        serving, buffer = DeviceServing(device), filled(device, 5000)
        neighbour.hold(serving.grant(buffer))
        neighbour.hold(serving.grant(buffer))
        assert serving.readers(buffer) == 2
        with pytest.raises(ConflictError):
            device.free(buffer)
        neighbour.let_go()
        assert serving.readers(buffer) == 0
        neighbour.hold(serving.grant(buffer))
        assert serving.readers(buffer) == 1
        neighbour.kill()
        assert serving.readers(buffer) == 0
        device.free(buffer)
        serving.close()

"""The code that drives a GPU, held to the contract over a fake of the runtime; what a test without a GPU can say."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tensorbus.errors import (
    ConflictError,
    CorruptError,
    ExpiredError,
    InvalidArgumentError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.testing._device_child import content, pattern
from tensorbus.testing._device_contract import DeviceContract, filled
from tensorbus.transport import CudaDevice, Device, StagingPlan, cuda_devices
from tensorbus.transport._device_cuda import STREAMS_MAX
from tensorbus.transport._device_vram import GRAIN_BYTES
from tests.unit.transport.fake_cuda import FakeCuda

PLAN = StagingPlan(slot_bytes=50_000, slots=3)


class TestCudaDeviceOverAFake(DeviceContract):
    @pytest.fixture(params=["late", "at once"])
    def device(self, request: pytest.FixtureRequest) -> Iterator[Device]:
        cuda = FakeCuda(eager=request.param == "at once")
        device = CudaDevice(0, runtime=cuda, staging=PLAN, threads=2)
        yield device
        device.close()
        assert (cuda.used, cuda.streams, cuda.events, cuda.registered, cuda.opened) == (0, {}, {}, {}, [])
        assert not any(block.live for block in cuda.host)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(cuda: FakeCuda) -> Iterator[CudaDevice]:
    device = CudaDevice(0, runtime=cuda, staging=PLAN, keep_bytes=8 * GRAIN_BYTES)
    yield device
    device.close()


def test_it_says_which_gpu_it_is(device: CudaDevice) -> None:
    assert device.identity == "cuda:01020004@0000:01:00.0"
    assert "Fake GPU, 64 MiB" in device.description
    assert cuda_devices(device.runtime) == 1


def test_the_host_fills_one_slot_while_the_device_empties_the_others(cuda: FakeCuda, device: CudaDevice) -> None:
    buffer, data = device.allocate(1_000_000, tenant="t"), pattern(1_000_000, 1)
    cuda.peak = 0
    device.upload(data, buffer)
    assert cuda.peak == PLAN.slots
    cuda.peak = 0
    assert np.array_equal(content(device, buffer), data)
    assert cuda.peak == PLAN.slots


def test_locked_memory_is_copied_in_one_piece_without_staging(cuda: FakeCuda, device: CudaDevice) -> None:
    data, buffer = pattern(1_000_000, 1), device.allocate(1_000_000, tenant="t")
    with device.lock(data), device.stream() as stream:
        cuda.calls.clear()
        device.upload(data[1000:], buffer, stream=stream)
        assert cuda.calls.count("memcpyAsync") == 1
        assert "eventSynchronize" not in cuda.calls
        assert not stream.done()
        stream.synchronize()
    assert "hostAlloc" not in cuda.calls
    assert cuda.registered == {}


def test_memory_that_is_locked_only_in_part_is_staged(cuda: FakeCuda, device: CudaDevice) -> None:
    data, buffer = pattern(100_000, 1), device.allocate(100_000, tenant="t")
    with device.lock(data[:50_000]):
        device.upload(data, buffer)
        assert np.array_equal(content(device, buffer), data)
        with pytest.raises(ConflictError):
            device.lock(data[40_000:60_000])


def test_read_only_and_empty_memory_cannot_be_locked(device: CudaDevice) -> None:
    for memory in (b"constant", bytearray()):
        with pytest.raises(InvalidArgumentError):
            device.lock(memory)


def test_unlocking_waits_for_the_copies_that_use_the_memory(cuda: FakeCuda, device: CudaDevice) -> None:
    data, buffer = pattern(100_000, 1), device.allocate(100_000, tenant="t")
    with device.stream() as stream:
        with device.lock(data):
            device.upload(data, buffer, stream=stream)
        data[:] = 0
        assert np.array_equal(content(device, buffer), pattern(100_000, 1))


def test_a_stream_keeps_what_it_reads_alive_until_it_was_waited_for(cuda: FakeCuda, device: CudaDevice) -> None:
    buffer = device.allocate(100_000, tenant="t")
    with device.stream() as stream:
        device.upload(pattern(100_000, 1), buffer, stream=stream)
        assert stream.uses(lambda use: buffer in use.buffers)
        stream.synchronize()
        assert not stream.uses(lambda use: True)


def test_freed_memory_is_used_again_by_its_tenant_only(cuda: FakeCuda, device: CudaDevice) -> None:
    first = filled(device, 3 << 20, tenant="a")
    device.free(first)
    cuda.calls.clear()
    again = device.allocate((3 << 20) - 5, tenant="a")
    assert again.address == first.address
    assert "malloc" not in cuda.calls
    device.free(again)
    device.free(device.allocate(3 << 20, tenant="b"))
    assert cuda.calls.count("malloc") == 1
    device.free(device.allocate(1, tenant="a"))
    assert cuda.calls.count("malloc") == 2  # it would have wasted too much


def test_no_more_is_kept_than_allowed(cuda: FakeCuda, device: CudaDevice) -> None:
    for buffer in [device.allocate(GRAIN_BYTES, tenant="t") for _ in range(12)]:
        device.free(buffer)
    assert cuda.used == 8 * GRAIN_BYTES
    assert device.free_bytes() == cuda.capacity
    newest = filled(device, 100, tenant="another")
    device.free(newest)
    assert device.allocate(100, tenant="another").address == newest.address
    device.free(device.allocate(9 * GRAIN_BYTES, tenant="t"))
    assert cuda.used == 8 * GRAIN_BYTES


def test_what_is_kept_makes_room_before_an_allocation_fails(cuda: FakeCuda, device: CudaDevice) -> None:
    for buffer in [device.allocate(GRAIN_BYTES, tenant="t") for _ in range(8)]:
        device.free(buffer)
    whole = device.allocate(cuda.capacity, tenant="u")
    with pytest.raises(OutOfSpaceError) as caught:
        device.allocate(1, tenant="t")
    assert caught.value.details["held_bytes"] == {"u": cuda.capacity}
    assert caught.value.details["free_bytes"] == 0
    device.free(whole)
    device.free(device.allocate(1, tenant="t"))


def test_exported_memory_is_not_used_again(cuda: FakeCuda, device: CudaDevice) -> None:
    buffer = filled(device, 100)
    device.export(buffer)
    device.withdraw(buffer)
    device.free(buffer)
    assert cuda.used == 0


def test_an_export_waits_for_what_is_being_written(cuda: FakeCuda, device: CudaDevice) -> None:
    other = CudaDevice(0, runtime=cuda)
    buffer, data = device.allocate(100_000, tenant="t"), pattern(100_000, 1)
    with device.stream() as stream, device.lock(data):
        device.upload(data, buffer, stream=stream)
        opened = other.open(replace(device.export(buffer), process="another"))
        assert np.array_equal(content(other, opened), data)
    other.close()


def test_an_export_opens_in_another_process_until_it_is_gone(cuda: FakeCuda, device: CudaDevice) -> None:
    other = CudaDevice(0, runtime=cuda)
    buffer = filled(device, 100)
    export = replace(device.export(buffer), process="another")
    opened = other.open(export)
    assert opened.imported
    assert opened.owner is None
    assert np.array_equal(content(other, opened), pattern(100, 1))
    assert cuda.opened == [buffer.address]
    other.free(opened)
    assert cuda.opened == []
    device.withdraw(buffer)
    device.free(buffer)
    with pytest.raises(ExpiredError, match="its owner freed it"):
        other.open(export)
    other.close()


def test_a_handle_of_a_wrong_size_is_refused(device: CudaDevice) -> None:
    export = replace(device.export(filled(device, 100)), process="another", handle=b"x" * 63)
    with pytest.raises(CorruptError):
        device.open(export)


def test_a_failed_export_leaves_the_buffer_as_it_was(cuda: FakeCuda, device: CudaDevice) -> None:
    buffer = filled(device, 100)
    cuda.failures["ipcGetMemHandle"] = 801
    with pytest.raises(UnavailableError):
        device.export(buffer)
    device.free(buffer)


def test_a_forked_child_is_told_so(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: real + 1)
        with pytest.raises(UnavailableError, match="forked"):
            device.allocate(1, tenant="t")
        device.close()  # is the parent's to do
    device.free(device.allocate(1, tenant="t"))


@pytest.mark.parametrize("call", ["hostAlloc", "memcpyAsync", "eventSynchronize", "streamSynchronize"])
def test_a_copy_that_fails_is_an_error_and_the_next_one_works(cuda: FakeCuda, device: CudaDevice, call: str) -> None:
    buffer, data = device.allocate(400_000, tenant="t"), pattern(400_000, 1)
    cuda.failures[call] = 2 if call == "hostAlloc" else 719
    with pytest.raises(OutOfSpaceError if call == "hostAlloc" else UnavailableError):
        device.upload(data, buffer)
    device.upload(data, buffer)
    assert np.array_equal(content(device, buffer), data)


def test_memory_that_could_not_be_wiped_is_given_back(cuda: FakeCuda, device: CudaDevice) -> None:
    cuda.failures["memsetAsync"] = 719
    with pytest.raises(UnavailableError, match="must be restarted"):
        device.allocate(1, tenant="t")
    assert cuda.used == 0


def test_streams_are_limited(device: CudaDevice) -> None:
    streams = [device.stream() for _ in range(STREAMS_MAX)]
    with pytest.raises(OutOfSpaceError):
        device.stream()
    streams[0].close()
    device.stream().close()
    for stream in streams:
        stream.close()


def test_a_broken_device_closes(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    device = CudaDevice(0, runtime=cuda)
    filled(device, 100)
    cuda.failures.update({"streamSynchronize": 700, "free": 700, "freeHost": 700})
    device.close()
    device.close()
    assert "closing a device" in caplog.text


def test_copies_noted_while_another_thread_waits_stay_noted(cuda: FakeCuda, device: CudaDevice) -> None:
    buffer, data = device.allocate(100_000, tenant="t"), pattern(100_000, 1)
    with device.lock(data), device.stream() as stream:
        device.upload(data, buffer, stream=stream)
        waits, goes_on = threading.Event(), threading.Event()
        real = cuda.streamSynchronize

        def slow(handle: int) -> None:
            real(handle)
            waits.set()
            assert goes_on.wait(10)

        cuda.streamSynchronize = slow  # type: ignore[method-assign]
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        assert waits.wait(10)
        cuda.streamSynchronize = real  # type: ignore[method-assign]
        device.upload(data, buffer, stream=stream)
        goes_on.set()
        thread.join()
        assert stream.uses(lambda use: buffer in use.buffers)


def test_small_copies_one_after_the_other_take_the_slots_in_turn(cuda: FakeCuda, device: CudaDevice) -> None:
    buffer = device.allocate(30, tenant="t")
    with device.stream() as stream:
        for number in range(PLAN.slots):
            device.upload(bytes([number] * 10), buffer, offset=10 * number, stream=stream)
        assert "eventSynchronize" not in cuda.calls
        stream.synchronize()
    assert content(device, buffer).tobytes() == bytes([0] * 10 + [1] * 10 + [2] * 10)

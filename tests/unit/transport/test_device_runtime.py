"""What the CUDA runtime's errors mean to a caller, and what is said where it is missing."""

from __future__ import annotations

import sys
import types

import pytest

from tensorbus.errors import (
    ConflictError,
    CorruptError,
    ExpiredError,
    InvalidArgumentError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.transport import cuda_missing
from tensorbus.transport._device_runtime import load_runtime, meaning, translated
from tests.unit.transport.fake_cuda import CudaRuntimeError, FakeCuda


@pytest.mark.parametrize(
    ("status", "opening", "expected"),
    [
        (1, False, InvalidArgumentError),
        (2, False, OutOfSpaceError),
        (2, True, OutOfSpaceError),
        (35, False, UnavailableError),
        (100, False, UnavailableError),
        (214, False, CorruptError),
        (700, False, UnavailableError),
        (712, False, ConflictError),
        (801, True, UnavailableError),
        (1, True, ExpiredError),
        (201, True, ExpiredError),
        (400, True, ExpiredError),
        (400, False, UnavailableError),
        (12345, False, UnavailableError),
    ],
)
def test_what_a_status_means(status: int, opening: bool, expected: type[TensorbusError]) -> None:
    error = meaning(status, "copying", opening=opening)
    assert type(error) is expected
    assert error.details["status"] == status


def test_an_error_of_the_runtime_is_the_cause_of_ours() -> None:
    wanted = pytest.raises(OutOfSpaceError, match="allocating: cudaErrorMemoryAllocation")
    with wanted as caught, translated("allocating", asked_bytes=17):
        raise CudaRuntimeError(2)
    assert isinstance(caught.value.__cause__, CudaRuntimeError)
    assert caught.value.details["asked_bytes"] == 17


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="ours"), translated("copying"):
        raise RuntimeError("ours")


def install(monkeypatch: pytest.MonkeyPatch, runtime: object) -> None:
    cuda = types.ModuleType("cupy.cuda")
    cuda.__dict__["runtime"] = runtime
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def test_without_cupy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnavailableError, match=r"tensorbus\[cuda\]"):
        load_runtime()
    assert "tensorbus[cuda13]" in str(cuda_missing())


@pytest.mark.parametrize(("devices", "said"), [(0, "no CUDA device"), (None, "insufficient"), (2, None)])
def test_without_a_driver_or_a_device_it_is_said(
    monkeypatch: pytest.MonkeyPatch, devices: int | None, said: str | None
) -> None:
    class Runtime(FakeCuda):
        def getDeviceCount(self) -> int:
            if devices is None:
                error = CudaRuntimeError(35)
                error.args = ("cudaErrorInsufficientDriver: CUDA driver version is insufficient",)
                raise error
            return devices

    install(monkeypatch, Runtime())
    missing = cuda_missing()
    assert missing is None if said is None else said in str(missing)

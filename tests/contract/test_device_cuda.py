"""A GPU is a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorbus.testing._device_contract import DeviceContract, NeighbourContract
from tensorbus.transport import CudaDevice, Device, StagingPlan, cuda_missing

MISSING = cuda_missing()
if MISSING is not None:
    pytest.skip(MISSING, allow_module_level=True)

pytestmark = pytest.mark.cuda


class TestCudaDevice(DeviceContract, NeighbourContract):
    neighbour_device = "cuda:0"

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = CudaDevice(0)
        yield device
        device.close()


class TestCudaDeviceWithLittleStaging(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = CudaDevice(0, staging=StagingPlan(slot_bytes=64 << 10, slots=2), keep_bytes=0)
        yield device
        device.close()

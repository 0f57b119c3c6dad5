"""The machine's memory is a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorbus.testing._device_contract import DeviceContract, NeighbourContract
from tensorbus.transport import Device, HostDevice


class TestHostDevice(DeviceContract, NeighbourContract):
    neighbour_device = "host"

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = HostDevice()
        yield device
        device.close()

"""Copies between pageable host memory and a GPU go through page-locked memory, piece by piece: which piece goes when.

Plain arithmetic; the memory and the streams are the device's. While the GPU moves one piece the processor copies the
next, so a copy takes as long as the slower of the two, not as both together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tensorbus.errors import InvalidArgumentError

SLOT_BYTES: Final = 16 << 20
SLOTS: Final = 3
_PIECE_BYTES_MIN: Final = 1 << 20
_PIECE_GRAIN: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingPlan:
    """Room for staging of one stream.

    Attributes:
        slot_bytes: Size of a piece of page-locked memory.
        slots: How many there are; with one, nothing overlaps.
    """

    slot_bytes: int = SLOT_BYTES
    slots: int = SLOTS

    def __post_init__(self) -> None:
        if self.slot_bytes < 1 or self.slots < 1:
            raise InvalidArgumentError(f"staging needs room: {self.slots} slots of {self.slot_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a copy that goes through one slot."""

    slot: int
    offset: int
    nbytes: int


class Side(Enum):
    """Who moves a piece next."""

    HOST = "host"
    DEVICE = "device"


def pieces(nbytes: int, plan: StagingPlan, *, first_slot: int = 0) -> list[Piece]:
    """Cut a copy into pieces, which take the slots in turn.

    A copy smaller than all slots together is cut finer, so that it overlaps too; pieces of less than 1 MiB would cost
    more in calls than they gain.
    """
    fair = -(-nbytes // (2 * plan.slots) // _PIECE_GRAIN) * _PIECE_GRAIN
    size = min(plan.slot_bytes, max(_PIECE_BYTES_MIN, fair))
    return [
        Piece((first_slot + number) % plan.slots, offset, min(size, nbytes - offset))
        for number, offset in enumerate(range(0, nbytes, size))
    ]


def download_steps(cut: list[Piece], slots: int) -> Iterator[tuple[Side, Piece]]:
    """The order of steps to the host: the device brings a piece into its slot, later the host takes it out.

    As many pieces are under way as there are slots, and a slot is emptied before the next piece comes into it.
    """
    ahead = min(slots, len(cut))
    for piece in cut[:ahead]:
        yield Side.DEVICE, piece
    for number, piece in enumerate(cut):
        yield Side.HOST, piece
        if number + ahead < len(cut):
            yield Side.DEVICE, cut[number + ahead]

"""The log on NATS JetStream: one append, one reading, the streams, an embedded server, and a twin in memory."""

from tensorbus.bus._append import append
from tensorbus.bus._auth import NatsAuth
from tensorbus.bus._blobs import get_blob, put_blob
from tensorbus.bus._health import Health, health_of
from tensorbus.bus._memory import Fault, MemoryBus, MemoryCluster
from tensorbus.bus._nats import NatsBus
from tensorbus.bus._port import (
    Appended,
    Bus,
    Conflict,
    Heartbeat,
    LogInfo,
    Message,
    Reader,
    StreamLimits,
    WrongSequenceError,
)
from tensorbus.bus._server import EmbeddedServer
from tensorbus.bus._streams import provision

__all__ = [
    "Appended",
    "Bus",
    "Conflict",
    "EmbeddedServer",
    "Fault",
    "Health",
    "Heartbeat",
    "LogInfo",
    "MemoryBus",
    "MemoryCluster",
    "Message",
    "NatsAuth",
    "NatsBus",
    "Reader",
    "StreamLimits",
    "WrongSequenceError",
    "append",
    "get_blob",
    "health_of",
    "provision",
    "put_blob",
]

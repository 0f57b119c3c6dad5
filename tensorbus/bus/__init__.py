"""The log on NATS JetStream: one append, one reading, the streams, an embedded server, and a twin in memory."""

from tensorbus.bus._admin import BusAdmin, BusReport, StreamCopy, StreamReport, UserReport
from tensorbus.bus._append import append
from tensorbus.bus._archive import Archive, ArchiveFile, ArchiveReport, StoredSnapshot
from tensorbus.bus._ask import Handler
from tensorbus.bus._auth import NatsAuth, new_seed, public_key
from tensorbus.bus._blobs import get_blob, put_blob, read_blob
from tensorbus.bus._grants import Permissions, Role, User, grants, lacking, parse_user, users_config, users_json
from tensorbus.bus._health import Health, health_of
from tensorbus.bus._memory import MemoryBus
from tensorbus.bus._memory_cluster import Fault, MemoryCluster
from tensorbus.bus._migrate import Migrated, migrate
from tensorbus.bus._monitor import Monitored, monitor_of, monitored
from tensorbus.bus._nats import NatsBus
from tensorbus.bus._port import (
    Appended,
    Bus,
    Conflict,
    Heartbeat,
    LogInfo,
    Message,
    Reader,
    Stream,
    StreamLimits,
    WrongSequenceError,
)
from tensorbus.bus._server import EmbeddedServer
from tensorbus.bus._streams import provision

__all__ = [
    "Appended",
    "Archive",
    "ArchiveFile",
    "ArchiveReport",
    "Bus",
    "BusAdmin",
    "BusReport",
    "Conflict",
    "EmbeddedServer",
    "Fault",
    "Handler",
    "Health",
    "Heartbeat",
    "LogInfo",
    "MemoryBus",
    "MemoryCluster",
    "Message",
    "Migrated",
    "Monitored",
    "NatsAuth",
    "NatsBus",
    "Permissions",
    "Reader",
    "Role",
    "StoredSnapshot",
    "Stream",
    "StreamCopy",
    "StreamLimits",
    "StreamReport",
    "User",
    "UserReport",
    "WrongSequenceError",
    "append",
    "get_blob",
    "grants",
    "health_of",
    "lacking",
    "migrate",
    "monitor_of",
    "monitored",
    "new_seed",
    "parse_user",
    "provision",
    "public_key",
    "put_blob",
    "read_blob",
    "users_config",
    "users_json",
]

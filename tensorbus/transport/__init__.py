"""Moving bytes and messages between processes: frames, connections, pooled segments, maps, bulk TCP.

Pure mechanics: it knows neither artifacts nor the log. Neighbours use what is re-exported here.
"""

from tensorbus.transport._channel import Channel, PeerInfo, SocketChannel
from tensorbus.transport._connection import Connection, Push, Reply
from tensorbus.transport._copy import copy_and_hash, default_threads, hash_bytes
from tensorbus.transport._fds import Fds
from tensorbus.transport._frames import Decoder, Frame, LocalProtocolError, RemoteProtocolError, encode
from tensorbus.transport._maps import PinnedMap, map_private, map_shared
from tensorbus.transport._memory import MemoryChannel, memory_pair
from tensorbus.transport._pool import PinWatch, Pool, PoolStats, Segment, SegmentState
from tensorbus.transport._segments import page_round
from tensorbus.transport._serving import Handler, PeerSession, Request, serve, serve_listener
from tensorbus.transport._sockets import Listener, connect_tcp, connect_unix, listen_tcp, listen_unix

__all__ = [
    "Channel",
    "Connection",
    "Decoder",
    "Fds",
    "Frame",
    "Handler",
    "Listener",
    "LocalProtocolError",
    "MemoryChannel",
    "PeerInfo",
    "PeerSession",
    "PinWatch",
    "PinnedMap",
    "Pool",
    "PoolStats",
    "Push",
    "RemoteProtocolError",
    "Reply",
    "Request",
    "Segment",
    "SegmentState",
    "SocketChannel",
    "connect_tcp",
    "connect_unix",
    "copy_and_hash",
    "default_threads",
    "encode",
    "hash_bytes",
    "listen_tcp",
    "listen_unix",
    "map_private",
    "map_shared",
    "memory_pair",
    "page_round",
    "serve",
    "serve_listener",
]

"""Moving bytes and messages between processes: frames, connections, pooled segments, maps, bulk TCP.

Pure mechanics: it knows neither artifacts nor the log. Neighbours use what is re-exported here.
"""

from tensorbus.transport._arrivals import Arrivals, Place
from tensorbus.transport._blocks import BlockTable, Span, cut, merged
from tensorbus.transport._bulk_client import BulkClient, OpenedSource
from tensorbus.transport._bulk_fetch import Origin, Transfer, TransferReport, Ways, parse_addresses
from tensorbus.transport._bulk_page_fetch import PagesCame, fetch_pages
from tensorbus.transport._bulk_pages import PageOwner, PageSource
from tensorbus.transport._bulk_server import BulkServer
from tensorbus.transport._bulk_talk import BulkOwner, BulkSink, BulkSource, SourceTables
from tensorbus.transport._channel import Channel, PeerInfo, SocketChannel
from tensorbus.transport._connection import Connection, Push, Reply
from tensorbus.transport._copy import copy_and_hash, default_threads, hash_bytes
from tensorbus.transport._device import Device, DeviceBuffer, DeviceExport, DeviceStream, HostMemory, PageLock
from tensorbus.transport._device_cuda import CudaDevice, cuda_devices
from tensorbus.transport._device_host import HostDevice
from tensorbus.transport._device_route import DeviceReader, DeviceRoute, DeviceServing
from tensorbus.transport._device_runtime import cuda_missing
from tensorbus.transport._device_staging import StagingPlan
from tensorbus.transport._fds import Fds
from tensorbus.transport._frames import Decoder, Frame, LocalProtocolError, RemoteProtocolError, encode
from tensorbus.transport._lines import Lines
from tensorbus.transport._maps import PinnedMap, map_private, map_shared, populate
from tensorbus.transport._memory import MemoryChannel, memory_pair
from tensorbus.transport._page_evict import NEVER_NS, Watermarks, batches, coldest_pages, expired_pages
from tensorbus.transport._page_layout import PAGE_PLACE, ArenaShape, PagePlaces, PageState, by_segment, slot_bytes
from tensorbus.transport._page_lend import TenantPages
from tensorbus.transport._page_maps import ArenaWriter, MappedArena, map_pages
from tensorbus.transport._page_pool import PagePool, PagePoolStats
from tensorbus.transport._pin_watch import PinWatch
from tensorbus.transport._pool import Pool, PoolStats, Segment, SegmentState
from tensorbus.transport._rendezvous import (
    WorkerCard,
    is_locked,
    living_workers,
    locked,
    remove_card,
    run_dir,
    write_card,
)
from tensorbus.transport._routes import Choice, Grant, Room, Route, RouteReader, RouteSource, bring, choose, offers_of
from tensorbus.transport._segments import page_round
from tensorbus.transport._serving import Handler, PeerSession, Request, serve, serve_listener
from tensorbus.transport._sockets import Listener, connect_tcp, connect_unix, listen_tcp, listen_unix
from tensorbus.transport._tls import TlsFiles, tls_files

__all__ = [
    "NEVER_NS",
    "PAGE_PLACE",
    "ArenaShape",
    "ArenaWriter",
    "Arrivals",
    "BlockTable",
    "BulkClient",
    "BulkOwner",
    "BulkServer",
    "BulkSink",
    "BulkSource",
    "Channel",
    "Choice",
    "Connection",
    "CudaDevice",
    "Decoder",
    "Device",
    "DeviceBuffer",
    "DeviceExport",
    "DeviceReader",
    "DeviceRoute",
    "DeviceServing",
    "DeviceStream",
    "Fds",
    "Frame",
    "Grant",
    "Handler",
    "HostDevice",
    "HostMemory",
    "Lines",
    "Listener",
    "LocalProtocolError",
    "MappedArena",
    "MemoryChannel",
    "OpenedSource",
    "Origin",
    "PageLock",
    "PageOwner",
    "PagePlaces",
    "PagePool",
    "PagePoolStats",
    "PageSource",
    "PageState",
    "PagesCame",
    "PeerInfo",
    "PeerSession",
    "PinWatch",
    "PinnedMap",
    "Place",
    "Pool",
    "PoolStats",
    "Push",
    "RemoteProtocolError",
    "Reply",
    "Request",
    "Room",
    "Route",
    "RouteReader",
    "RouteSource",
    "Segment",
    "SegmentState",
    "SocketChannel",
    "SourceTables",
    "Span",
    "StagingPlan",
    "TenantPages",
    "TlsFiles",
    "Transfer",
    "TransferReport",
    "Watermarks",
    "Ways",
    "WorkerCard",
    "batches",
    "bring",
    "by_segment",
    "choose",
    "coldest_pages",
    "connect_tcp",
    "connect_unix",
    "copy_and_hash",
    "cuda_devices",
    "cuda_missing",
    "cut",
    "default_threads",
    "encode",
    "expired_pages",
    "fetch_pages",
    "hash_bytes",
    "is_locked",
    "listen_tcp",
    "listen_unix",
    "living_workers",
    "locked",
    "map_pages",
    "map_private",
    "map_shared",
    "memory_pair",
    "merged",
    "offers_of",
    "page_round",
    "parse_addresses",
    "populate",
    "remove_card",
    "run_dir",
    "serve",
    "serve_listener",
    "slot_bytes",
    "tls_files",
    "write_card",
]

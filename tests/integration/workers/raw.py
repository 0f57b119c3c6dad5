"""A caller that speaks the control protocol itself, call by call, without the SDK."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorbus.clock import Deadline
from tensorbus.model import Layout, Manifest, TensorSpec, plan_layout
from tensorbus.testing._processes import Program
from tensorbus.transport import (
    Connection,
    PinnedMap,
    Push,
    Reply,
    connect_tcp,
    connect_unix,
    hash_bytes,
    map_private,
    map_shared,
)

CALL_S = 30.0
DEFAULT = "default"


async def until(condition: Callable[[], object], what: str, *, timeout_s: float = 60.0) -> None:
    """Wait for something to become true, with a deadline."""
    async with Deadline(timeout_s, what=what).scope():
        while not condition():
            await asyncio.sleep(0.02)


async def held_by(raw: Raw, ref: str, *workers: str) -> None:
    """Wait until those workers are known to have copies: a reader has its bytes before the fact of them is kept."""
    async with Deadline(20, what=f"copies of {ref} on {workers}").scope():
        while sorted(one["worker"] for one in (await raw.resolve(ref))["replicas"]) != list(workers):
            await asyncio.sleep(0.02)


def flip(worker: Program, near: bytes) -> None:
    """Change one bit of each of a worker's segments in which some bytes lie."""
    maps = Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
    found = False
    with open(f"/proc/{worker.pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            if "memfd:tensorbus" not in line:
                continue
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            memory.seek(start)
            at = memory.read(end - start).find(near)
            if at >= 0:
                memory.seek(start + at)
                memory.write(bytes([near[0] ^ 1]))
                found = True
    assert found, "the bytes are not there"


@dataclass
class Opened:
    """An artifact as it was mapped. Dropping it, and every view of it, ends the pin."""

    info: dict[str, Any]
    manifest: Manifest
    layout: Layout
    parts: list[PinnedMap]
    path: str
    why: str

    def view(self, name: str) -> memoryview:
        """A tensor's bytes, writable: what is written goes to this process's own copy."""
        index = self.manifest.index(name)
        offset = self.layout.offsets[index]
        for part in self.parts[:-1]:
            size = -(-len(part) // 4096) * 4096
            if offset < size:
                return memoryview(part)[offset : offset + self.manifest.tensors[index].nbytes]
            offset -= size
        return memoryview(self.parts[-1])[offset : offset + self.manifest.tensors[index].nbytes]

    def bytes(self, name: str) -> bytes:
        return bytes(self.view(name))

    def right(self) -> bool:
        """Whether every tensor is what its digest says."""
        return all(
            spec.digest is not None and hash_bytes(self.view(spec.name)).hex() == spec.digest for spec in self.manifest
        )


def manifest_of(tensors: Mapping[str, bytes], *, digest: bool = True) -> Manifest:
    specs = (TensorSpec(name, "u8", (len(data),)) for name, data in tensors.items())
    manifest = Manifest(tuple(specs))
    if not digest:
        return manifest
    return manifest.with_digests([hash_bytes(memoryview(tensors[name])) for name in manifest.names])


@dataclass
class Raw:
    """One connection of one caller."""

    connection: Connection
    said: dict[str, Any] = field(default_factory=dict)
    pushes: list[Push] = field(default_factory=list)
    kept: list[PinnedMap] = field(default_factory=list)

    @classmethod
    async def unix(cls, socket: Path, *, tenant: str = DEFAULT) -> Raw:
        return await cls._hello(await connect_unix(socket, deadline=Deadline(CALL_S)), tenant)

    @classmethod
    async def tcp(cls, address: str, *, tenant: str = DEFAULT) -> Raw:
        host, _, port = address.rpartition(":")
        return await cls._hello(await connect_tcp(host, int(port), deadline=Deadline(CALL_S)), tenant)

    @classmethod
    async def _hello(cls, channel: Any, tenant: str) -> Raw:
        pushes: list[Push] = []
        raw = cls(Connection(channel, on_push=pushes.append), pushes=pushes)
        hello = {"protocol": 1, "tenant": tenant, "pid": os.getpid(), "version": "raw"}
        raw.said = (await raw.reply("hello", hello)).data
        return raw

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.connection.close()

    async def reply(
        self, op: str, args: Mapping[str, object] | None = None, *, body: bytes = b"", timeout_s: float = CALL_S
    ) -> Reply:
        return await self.connection.call(op, args, body=body, deadline=Deadline(timeout_s, what=op))

    async def call(self, op: str, *, timeout_s: float = CALL_S, **args: object) -> dict[str, Any]:
        return (await self.reply(op, args, timeout_s=timeout_s)).data

    async def alloc(self, nbytes: int, *, purpose: str = "put") -> tuple[dict[str, Any], PinnedMap]:
        reply = await self.reply("alloc", {"nbytes": nbytes, "purpose": purpose, "fresh": True})
        fd, pin = reply.fds.take()
        return reply.data, map_shared(fd, nbytes, pin)

    async def _filled(
        self, tensors: Mapping[str, bytes], *, digest: bool, purpose: str
    ) -> tuple[dict[str, Any], Manifest, Layout, PinnedMap]:
        manifest = manifest_of(tensors, digest=digest)
        layout = plan_layout(manifest)
        segment, memory = await self.alloc(layout.nbytes, purpose=purpose)
        for name, offset in zip(manifest.names, layout.offsets, strict=True):
            memory[offset : offset + len(tensors[name])] = tensors[name]
        return segment, manifest, layout, memory

    async def put(
        self, tensors: Mapping[str, bytes], *, digest: bool = True, timeout_s: float = CALL_S, **args: object
    ) -> dict[str, Any]:
        segment, manifest, layout, memory = await self._filled(tensors, digest=digest, purpose="put")
        memory.close()
        asked = {
            "segment": segment["segment"],
            "generation": segment["generation"],
            "layout": json.loads(layout.to_json()),
            **args,
        }
        return (await self.reply("commit", asked, body=manifest.to_json().encode(), timeout_s=timeout_s)).data

    async def register(
        self, tensors: Mapping[str, bytes], *, lease_s: float = 60.0, digest: bool = False, **args: object
    ) -> dict[str, Any]:
        """Keeps the memory mapped, as its owner does."""
        segment, manifest, layout, memory = await self._filled(tensors, digest=digest, purpose="empty")
        self.kept.append(memory)
        asked = {
            "parts": [[segment["segment"], segment["generation"]]],
            "layout": json.loads(layout.to_json()),
            "lease_s": lease_s,
            **args,
        }
        return (await self.reply("register", asked, body=manifest.to_json().encode())).data

    async def open(self, artifact: str, *, timeout_s: float = CALL_S, **args: object) -> Opened:
        reply = await self.reply("open", {"artifact": artifact, **args}, timeout_s=timeout_s)
        data, fds = reply.data, reply.fds.take()
        parts = [
            map_private(fds[2 * index], part["nbytes"], fds[2 * index + 1])
            for index, part in enumerate(data["parts"])  # type: ignore[arg-type, var-annotated]  # a list
        ]
        manifest = Manifest.from_json(bytes(reply.body))
        layout = Layout.from_json(json.dumps(data["layout"]), manifest)
        return Opened(data["artifact"], manifest, layout, parts, str(data["path"]), str(data["why"]))  # type: ignore[arg-type]  # a dict

    async def read_permit(self, artifact: str, worker: str) -> str:
        """What a worker wants to see of who reads an artifact from it."""
        located = await self.call("locate", artifact=artifact)
        return str(next(source["permit"] for source in located["sources"] if source["worker"] == worker))

    async def resolve(self, ref: str, **args: object) -> dict[str, Any]:
        return (await self.call("resolve", ref=ref, **args))["artifact"]

    async def keys(self) -> list[str]:
        found: list[str] = []
        after: str | None = None
        while True:
            page = await self.call("ls", **({} if after is None else {"after": after}))
            found += [item["key"] for item in page["items"]]
            after = page["next"]
            if after is None:
                return found

    async def events(self, *, after: int = 0) -> list[dict[str, Any]]:
        """Everything that is on the log now."""
        cursor = (await self.call("events_open", after=after))["cursor"]
        found, done = [], False
        while not done:
            page = await self.call("events_next", cursor=cursor, wait_s=5)
            found += page["items"]
            done = page["done"]
        await self.call("events_close", cursor=cursor)
        return found

    async def live_workers(self) -> list[str]:
        return [item["worker"] for item in (await self.call("workers"))["items"] if item["live"]]

    async def stats(self) -> dict[str, Any]:
        return await self.call("stats")

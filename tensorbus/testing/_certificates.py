"""Certificates for tests of TLS on loopback, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorbus.errors import UnavailableError

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """An authority and what it signed. All files are PEM."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    def server_config(self, *, clients: bool = False) -> str:
        """The ``tls`` block of a nats-server.

        Args:
            clients: Whether clients must show a certificate of the authority.
        """
        verify = f'ca_file: "{self.ca}", verify: true' if clients else ""
        return f'tls {{ cert_file: "{self.server_cert}", key_file: "{self.server_key}", timeout: 5, {verify} }}\n'


def make_certificates(folder: Path) -> Certificates:
    """An authority, a server for 127.0.0.1 and localhost, and a client.

    Raises:
        UnavailableError: If there is no openssl.
    """
    if shutil.which("openssl") is None:
        raise UnavailableError("there is no openssl in PATH")
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key = folder / "ca.pem", folder / "ca-key.pem"
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl("req", "-x509", *_KEY, *usage, "-subj", "/CN=tensorbus test", "-keyout", ca_key, "-out", ca)
    made: dict[str, Path] = {}
    for name in ("server", "client"):
        cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
        made |= {f"{name}_cert": cert, f"{name}_key": key}
        names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        signed = ("-CA", ca, "-CAkey", ca_key, "-addext", "basicConstraints=critical,CA:FALSE")
        _openssl("req", "-x509", *_KEY, *names, *signed, "-subj", f"/CN={name}", "-keyout", key, "-out", cert)
    return Certificates(ca=ca, **made)


def _openssl(*args: str | Path) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)

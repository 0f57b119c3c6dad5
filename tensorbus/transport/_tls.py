"""Mutual TLS on bulk connections: both sides show a certificate of the cluster's own authority."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from tensorbus.config import Settings
from tensorbus.errors import DeniedError, InvalidArgumentError, UnavailableError

FIRST_BYTE = 0x16
"""A TLS handshake begins with it, and no plain message does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where a process's certificate, its key, and the certificates of the cluster's authority are, as PEM."""

    cert: Path
    key: Path
    ca: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """What one side of a connection needs.

        Who shows a certificate of the authority belongs to the cluster, whatever address it has.

        Raises:
            InvalidArgumentError: If a file cannot be used; it says which.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.cert, self.key)
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as exc:
            raise InvalidArgumentError(
                f"data_tls_cert {self.cert}, data_tls_key {self.key} or data_tls_ca {self.ca} cannot be used: {exc}"
            ) from exc
        return context


def tls_files(settings: Settings) -> TlsFiles | None:
    """The files that the settings name, or ``None`` where bytes go in the clear."""
    cert, key, ca = settings.data_tls_cert, settings.data_tls_key, settings.data_tls_ca
    return None if cert is None or key is None or ca is None else TlsFiles(cert=cert, key=key, ca=ca)


def shake_hands(sock: ssl.SSLSocket) -> None:
    """Begin to speak TLS; the socket's timeout bounds it.

    Raises:
        DeniedError: If the other side's certificate is not of the cluster's authority, or it speaks no TLS.
        UnavailableError: If it went away or said nothing.
    """
    try:
        sock.do_handshake()
    except ssl.SSLEOFError as exc:
        raise UnavailableError(f"the other side went away within the TLS handshake: {exc}") from exc
    except (ssl.SSLError, ssl.CertificateError) as exc:
        raise DeniedError(f"no TLS with a certificate of the cluster's authority: {exc}") from exc
    except OSError as exc:
        raise UnavailableError(f"the TLS handshake failed: {exc}") from exc


def refused(exc: OSError) -> bool:
    """Whether a TLS error says that the other side does not accept our certificate."""
    reason = str(getattr(exc, "reason", "")) if isinstance(exc, ssl.SSLError) else ""
    return "CERTIFICATE" in reason or "UNKNOWN_CA" in reason

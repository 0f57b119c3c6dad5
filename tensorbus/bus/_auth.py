"""As whom a connection to NATS is made, and whether it is encrypted."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from tensorbus.config import Settings
from tensorbus.errors import InvalidArgumentError

_NOT_A_TOKEN = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAuth:
    """Files that say who connects and whom to trust. They are read again after a loss, so they can be renewed.

    Attributes:
        creds: A NATS credentials file (a JWT with its seed).
        nkey_seed: A file with the seed of an nkey.
        tls_ca: Certificates of the authorities that sign the servers'. With it a server without TLS is refused.
        tls_cert: A client certificate, for servers that ask for one.
        tls_key: Its private key.
    """

    creds: Path | None = None
    nkey_seed: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @classmethod
    def of(cls, settings: Settings) -> NatsAuth:
        """What the settings name; nothing for the home's own server, which knows no users."""
        if settings.nats_url is None:
            return cls()
        return cls(
            creds=settings.nats_creds,
            nkey_seed=settings.nats_nkey_seed,
            tls_ca=settings.nats_tls_ca,
            tls_cert=settings.nats_tls_cert,
            tls_key=settings.nats_tls_key,
        )

    @property
    def encrypts(self) -> bool:
        """Whether only an encrypted connection will do, whatever the URL says."""
        return self.tls_ca is not None or self.tls_cert is not None

    def context(self) -> ssl.SSLContext:
        """How servers are verified: by ``tls_ca``, or else by the machine's own authorities.

        Raises:
            InvalidArgumentError: If a file is not there or is no certificate or key.
        """
        try:
            context = ssl.create_default_context(cafile=None if self.tls_ca is None else str(self.tls_ca))
        except (OSError, ValueError) as exc:
            raise InvalidArgumentError(f"{self.tls_ca} holds no certificates: {exc}", path=str(self.tls_ca)) from exc
        self.renew(context)
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Read the client's certificate again, which may have been replaced by a fresh one.

        Raises:
            InvalidArgumentError: If it cannot be read, or does not fit its key.
        """
        if self.tls_cert is None:
            return
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ValueError) as exc:
            both = f"{self.tls_cert} and {self.tls_key}"
            raise InvalidArgumentError(f"{both} are no certificate with its key: {exc}") from exc

    def seed(self) -> str | None:
        """The nkey's seed.

        Raises:
            InvalidArgumentError: If the file cannot be read or holds no seed.
        """
        if self.nkey_seed is None:
            return None
        text = _read(self.nkey_seed, "the nkey's seed")
        public_key(text, where=str(self.nkey_seed))
        return text

    def check(self) -> None:
        """See that all files can be used, before the first attempt to connect.

        Raises:
            InvalidArgumentError: If one cannot.
        """
        self.seed()
        if self.creds is not None:
            _read(self.creds, "credentials")
        if self.encrypts:
            self.context()


def public_key(seed: str, *, where: str = "the text") -> str:
    """The public key of an nkey's seed, by which servers know a user.

    Raises:
        InvalidArgumentError: If it is no seed.
    """
    import nkeys  # brings a native library with it, which who connects in the clear does not need

    try:
        return bytes(nkeys.from_seed(bytearray(seed.encode("ascii"))).public_key).decode("ascii")
    except (nkeys.NkeysError, ValueError) as exc:
        raise InvalidArgumentError(f"{where} holds no seed of an nkey") from exc


def new_seed(entropy: bytes) -> str:
    """The seed of a new nkey for a user, from 32 random bytes."""
    import nkeys

    return bytes(nkeys.encode_seed(entropy, nkeys.PREFIX_BYTE_USER)).decode("ascii")


def inbox_prefix(name: str) -> str:
    """The first token of the inboxes of who has that name: what permissions confine them to."""
    return "_INBOX_" + _NOT_A_TOKEN.sub("_", name)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as exc:
        raise InvalidArgumentError(f"{what} in {path} is no text", path=str(path)) from exc
    except OSError as exc:
        text = f"{what} in {path} cannot be read: {exc.strerror or exc}"
        raise InvalidArgumentError(text, path=str(path)) from exc

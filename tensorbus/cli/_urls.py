"""URLs as they may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def without_password(urls: str) -> str:
    """One or several URLs with commas, each password and token replaced by ``***``."""
    return ",".join(_hidden(one.strip()) for one in urls.split(","))


def _hidden(url: str) -> str:
    parts = urlsplit(url)
    secret, at, where = parts.netloc.rpartition("@")
    if not at:
        return url
    user, colon, _ = secret.partition(":")
    return urlunsplit(parts._replace(netloc=f"{user}:***@{where}" if colon else f"***@{where}"))

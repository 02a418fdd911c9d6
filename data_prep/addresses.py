"""Addresses of servers in the configuration, and how secrets are kept out of it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def server_root(url: str) -> str:
    """``http://host:port`` of an address that may end in ``/v1`` and slashes."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_url(url: str, field: str, *, key_field: str = "") -> None:
    """Raise ``ValueError`` unless ``url`` names an HTTP server and can hold no secret.

    ``key_field``: the setting that names the variable with the key, where ``field`` has one.
    """
    # Looked for in the text: an address that cannot be parsed may hold a password as well.
    if set("@?#") & set(url):
        advice = "put the key into an environment variable and name that in"
        raise ValueError(
            f"{field}: no user, password or query in the address"
            + (f"; {advice} {key_field}" if key_field else "")
        )
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_server = False
    if not is_server or not url.isprintable() or " " in url:
        raise ValueError(f"{field}={url!r}: expected an address such as http://localhost:8000/v1")


def check_variable(name: str, field: str) -> None:
    """Raise ``ValueError`` unless ``name`` can be an environment variable's (or is empty)."""
    if name and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"{field}: expected the name of an environment variable, such as MY_KEY; it holds the "
            "key, which has no place in a configuration"
        )

"""Seeds by name: every random stream comes from the one ``seed`` of the configuration.

A stream's seed depends on its names only, never on the order in which streams are created, so
adding a stream leaves the others as they were.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in ``[0, 2**63)`` for the stream called ``names``.

    ``derive_seed(s, "a", "b")`` and ``derive_seed(s, "ab")`` differ: each name is hashed with its
    type and length. Raises ``ValueError`` when no name is given.
    """
    if not names:
        raise ValueError("derive_seed: give the stream at least one name")
    digest = hashlib.sha256(f"seed:{seed}".encode())
    for name in names:
        text = f"{type(name).__name__}:{name}".encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return int.from_bytes(digest.digest()[:8], "little") >> 1

"""The identity of a token row: the same tokens have the same id in every store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def hash_token_ids(ids: Sequence[int]) -> str:
    """First 32 hex characters of sha256 over the little-endian int32 token ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:32]

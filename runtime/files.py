"""Files that appear whole or not at all, and their hashes."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

STAGED_PREFIX = ".tmp-"  # of unfinished files; a crash may leave one behind


def sha256_file(file: Path) -> str:
    """sha256 of the file's content, hex."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_atomic(file: Path, data: bytes | str) -> None:
    """Write durably: a reader, and the next start after a crash, see the old file or the new one.

    Text is UTF-8. The folder must exist.
    """
    content = data.encode() if isinstance(data, str) else data
    replace_atomic(file, lambda staged: staged.write_bytes(content))


def replace_atomic(file: Path, write: Callable[[Path], object]) -> None:
    """Like :func:`write_atomic`; ``write`` makes the new content at the path it is given.

    The mode is that of any new file, whatever ``write`` gave it: some libraries write files that
    only their owner can read.
    """
    writer = f"{os.getpid()}-{threading.get_ident()}"  # no other one stages under this name
    staged = file.with_name(f"{STAGED_PREFIX}{writer}-{file.name}")
    try:
        staged.touch()
        mode = staged.stat().st_mode
        write(staged)
        staged.chmod(mode)
        sync_path(staged)
        os.replace(staged, file)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync_path(file.parent)


def sync_path(path: Path) -> None:
    """fsync a file, or a directory so that its renames are durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

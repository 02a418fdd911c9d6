"""Atomic files: old or new, never a part, and nothing left behind."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.files import replace_atomic, sha256_file, write_atomic


def test_a_hash_is_that_of_the_content(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "käse")
    assert sha256_file(tmp_path / "a") == hashlib.sha256("käse".encode()).hexdigest()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomic(file, b"old")

    def fail_half_way(staged: Path) -> None:
        staged.write_bytes(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_atomic(file, fail_half_way)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_content_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), real_sync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), real_replace(a, b)))
    write_atomic(tmp_path / "a", b"x")
    assert order == ["sync", "rename", "sync"]


def test_a_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()

    def write_private(staged: Path) -> None:
        staged.unlink()
        staged.write_bytes(b"1")
        staged.chmod(0o600)

    replace_atomic(tmp_path / "head", write_private)
    assert (tmp_path / "head").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_threads_that_write_one_file_do_not_share_what_they_stage(tmp_path: Path) -> None:
    both_write = threading.Barrier(2, timeout=10)

    def write(text: str) -> None:
        def stage(staged: Path) -> None:
            staged.write_text(text)
            both_write.wait()

        replace_atomic(tmp_path / "shared", stage)

    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(write, ["one", "two"]):
            pass
    assert (tmp_path / "shared").read_text() in ("one", "two")
    assert [file.name for file in tmp_path.iterdir()] == ["shared"]

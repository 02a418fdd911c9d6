from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.console import format_bytes
from mtp_train.features.estimate import DiskUsage, DiskUsageFn, check_free_disk, estimate_size
from tests.unit.features.stores import WIDTH, make_samples, write_store


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3", "fp32"])
def test_the_estimate_is_close_to_what_is_written(tmp_path: Path, codec: str) -> None:
    samples = make_samples(200)
    estimate = estimate_size(
        [len(sample.input_ids) for sample in samples],
        hidden_size=WIDTH,
        codec=codec,  # type: ignore[arg-type]
    )
    write_store(tmp_path, codec=codec, samples=samples, shard_tokens=400)  # type: ignore[arg-type]
    written = sum(file.stat().st_size for file in tmp_path.glob("shard-*"))
    assert 0.8 * written < estimate.num_bytes < 1.5 * written


def test_a_full_disk_is_refused_with_what_is_needed_and_how_to_reduce(tmp_path: Path) -> None:
    estimate = estimate_size([1000] * 10, hidden_size=100, codec="bf16")

    def usage(path: Path) -> DiskUsage:
        return DiskUsage(total=10_000_000, used=0, free=estimate.num_bytes + 500_000)

    check_free_disk(estimate, tmp_path, min_free_share=0.05, usage=usage)
    with pytest.raises(ValueError, match=r"2\.1 MB needed, but 2\.6 MB are free") as caught:
        check_free_disk(estimate, tmp_path, min_free_share=0.0501, usage=usage)
    assert "features.codec=fp8_e4m3 needs 1.1 MB" in str(caught.value)
    assert "features.codec=fp32" not in str(caught.value)
    assert "min_free_disk_share=0.0501" in str(caught.value)


def test_a_small_dump_is_let_through_on_a_nearly_full_disk(tmp_path: Path) -> None:
    estimate = estimate_size([1000] * 10, hidden_size=100, codec="bf16")

    def usage_of(free: int) -> DiskUsageFn:
        return lambda path: DiskUsage(total=100 * free, used=99 * free, free=free)

    small = usage_of(100 * estimate.num_bytes)
    check_free_disk(estimate, tmp_path, min_free_share=0.05, usage=small)
    with pytest.raises(ValueError, match="must stay free"):
        check_free_disk(
            estimate, tmp_path, min_free_share=0.05, usage=usage_of(99 * estimate.num_bytes)
        )


def test_bytes_are_shown_with_a_unit() -> None:
    assert [format_bytes(n) for n in (12, 1_500, 2e6, 3.5e9, 4e13)] == [
        "12 B",
        "1.5 kB",
        "2.0 MB",
        "3.5 GB",
        "40.0 TB",
    ]

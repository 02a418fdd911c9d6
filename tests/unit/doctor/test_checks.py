"""Verdicts on machines that are not here: each says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mtp_train.doctor.checks import check_machine, worst
from mtp_train.doctor.driver import Gpu
from mtp_train.doctor.facts import (
    Disk,
    Finding,
    Machine,
    Memory,
    Packages,
    Processor,
    Rates,
    Torch,
)

GB = 10**9
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GB, "580.95.05", "9.0")
GOOD = Machine(
    python="3.12.1",
    processor=Processor("A Processor", frozenset({"avx2", "avx512f", "avx512_bf16"}), 8, 8, 16),
    memory=Memory(64 * GB, 60 * GB),
    torch=Torch("2.13.0+cpu"),
    gpus=None,
    nvcc="",
    gxx="13.2.0",
    disk=Disk("/data", 1000 * GB, 500 * GB, write_rate=1e9, read_rate=2e9),
    packages=Packages({"torch": "2.13.0+cpu", "rich": "15.0.0"}, {"torch": "2.13.0", "rich": ""}),
    rates=(Rates("cpu", 40e9, 200e9, 500e9),),
)
WITH_GPU = replace(GOOD, torch=Torch("2.13.0", "13.0", sees_gpu=True), gpus=(H100,), nvcc="13.0")

Change = Callable[[Machine], Machine]


def findings_of(machine: Machine, *, share: float = 0.05) -> dict[str, Finding]:
    return {f.name: f for f in check_machine(machine, min_free_disk_share=share)}


@pytest.mark.parametrize("machine", [GOOD, WITH_GPU])
def test_a_good_machine_needs_no_fix(machine: Machine) -> None:
    findings = check_machine(machine, min_free_disk_share=0.05)
    assert worst(findings) == "ok"
    assert [f.fix for f in findings if f.fix] == []
    assert len({f.name for f in findings}) == len(findings)


@pytest.mark.parametrize(
    ("change", "name", "verdict", "text", "fix"),
    [
        (
            lambda m: replace(m, torch=Torch(error="No module named 'torch'")),
            "torch",
            "fail",
            "cannot be imported: No module named 'torch'",
            "make setup",
        ),
        (lambda m: replace(m, gxx=""), "g++", "warn", "cannot be compiled", "apt-get install g++"),
        (
            lambda m: replace(m, disk=replace(m.disk, free=20 * GB)),
            "disk",
            "fail",
            "below features.min_free_disk_share=0.05, mtp precompute would refuse",
            "run.root=",
        ),
        (
            lambda m: replace(m, disk=replace(m.disk, total=100 * GB, free=10 * GB)),
            "disk",
            "warn",
            "little for features",
            "features=fp8",
        ),
        (
            lambda m: replace(m, disk=replace(m.disk, write_rate=20e6)),
            "disk",
            "warn",
            "writes 0.02 GB/s",
            "features.path=",
        ),
        (
            lambda m: replace(m, disk=replace(m.disk, is_writable=False)),
            "disk",
            "fail",
            "not writable",
            "run.root=",
        ),
        (
            lambda m: replace(m, processor=replace(m.processor, flags=frozenset({"avx2"}))),
            "processor",
            "warn",
            "no native bfloat16",
            "target.dtype=auto",
        ),
        (
            lambda m: replace(m, processor=replace(m.processor, limit=2.5)),
            "cores",
            "warn",
            "container limit 2.5",
            "runtime.num_threads=2",
        ),
        (
            lambda m: replace(m, memory=Memory(64 * GB, 60 * GB, 2 * GB)),
            "memory",
            "fail",
            "container limit 2.0 GB",
            "raise the limit",
        ),
        (
            lambda m: replace(m, memory=Memory(8 * GB, 6 * GB)),
            "memory",
            "warn",
            "6.0 GB available",
            "runtime.num_pages",
        ),
        (
            lambda m: replace(m, rates=(Rates("cpu", 40e9, 200e9, 100e9),)),
            "CPU speed",
            "warn",
            "bfloat16 should be the faster one",
            "other load",
        ),
        (
            lambda m: replace(
                m, packages=Packages({"rich": "15"}, {"rich": "", "torch": "2.13.0"})
            ),
            "packages",
            "fail",
            "missing: torch",
            "make setup",
        ),
        (
            lambda m: replace(m, packages=Packages({"torch": "2.9.0"}, {"torch": "2.13.0"})),
            "packages",
            "warn",
            "torch 2.9.0 (tested: 2.13.0)",
            "make clean, then make setup",
        ),
        (
            lambda m: replace(m, gpus=(H100,)),
            "GPU",
            "warn",
            "not used, torch is a CPU build",
            "make setup GPU=1",
        ),
        (
            lambda m: replace(m, torch=Torch("2.13.0", "13.0")),
            "GPU",
            "warn",
            "none that nvidia-smi lists",
            "driver 580.65.06 or newer",
        ),
        (
            lambda m: replace(m, engine_python="/venv/bin/python"),
            "vLLM",
            "fail",
            "none in engine.python=/venv/bin/python",
            "an environment that has vLLM",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(
    change: Change, name: str, verdict: str, text: str, fix: str
) -> None:
    findings = findings_of(change(GOOD))
    found = findings[name]
    assert found.verdict == verdict
    assert text in found.text
    assert fix in found.fix
    assert worst(list(findings.values())) == verdict
    assert [other for other in findings.values() if other.verdict != "ok"] == [found]


@pytest.mark.parametrize(
    ("driver", "cuda", "fix"),
    [
        # torch's CUDA is newer than the driver: by a major version, or by all of them
        ("560.35.03", "13.0", "make setup GPU=1 TORCH_CUDA=12"),
        ("570.86.15", "13.2", "update the driver, or install a build for CUDA 12"),
        ("470.256.02", "12.8", "update the driver"),
    ],
)
def test_an_old_driver_fails_and_the_fix_fits_it(driver: str, cuda: str, fix: str) -> None:
    machine = replace(
        WITH_GPU,
        gpus=(replace(H100, driver=driver),),
        torch=Torch("2.13.0", cuda, sees_gpu=False),
    )
    found = findings_of(machine)["GPU"]
    assert found.verdict == "fail"
    assert f"driver {driver} is too old for CUDA {cuda}" in found.text
    assert found.fix.startswith(fix) or fix in found.fix
    assert ("TORCH_CUDA" in found.fix) == (driver >= "525")


def test_a_driver_that_is_new_enough_but_a_device_that_is_hidden() -> None:
    found = findings_of(replace(WITH_GPU, torch=Torch("2.13.0", "13.0")))["GPU"]
    assert found.verdict == "fail"
    assert "CUDA_VISIBLE_DEVICES" in found.fix


def test_a_gpu_needs_nvcc_only_for_what_compiles() -> None:
    assert findings_of(replace(WITH_GPU, nvcc=""))["nvcc"].verdict == "warn"
    assert findings_of(replace(GOOD, nvcc=""))["nvcc"].verdict == "ok"
    assert findings_of(replace(WITH_GPU, gxx=""))["g++"].verdict == "ok"


def test_vllm_is_named_where_it_is() -> None:
    machine = replace(GOOD, engine_python="/venv/bin/python", engine_vllm="0.32.0")
    assert findings_of(machine)["vLLM"].verdict == "ok"
    assert "vLLM" not in findings_of(GOOD)

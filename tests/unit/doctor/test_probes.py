"""What is found out: from files and programs made up here, and once from this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train import cli
from mtp_train.config import Config
from mtp_train.doctor import command, driver, measure, probes
from mtp_train.doctor.driver import Gpu, driver_problem, list_gpus
from mtp_train.doctor.facts import Disk, Machine
from mtp_train.doctor.feasibility import check_target, measure_sizes
from mtp_train.settings import load_config
from runtime.models.config import ModelConfig
from runtime.models.config import load_config as load_model_config
from tests.unit.runtime.model_fixtures import save_llama

SMI = "NVIDIA H100 80GB HBM3, 81559, 560.35.03, 9.0\n"


def make_config(root: Path, **sections: Any) -> Config:
    raw = {"run": {"name": "d", "root": str(root / "runs")}, "target": {"path": ""}, "data": {}}
    return load_config(raw | {"runtime": {"num_threads": 1}} | sections)


def fake_run(outputs: dict[str, str]) -> driver.Run:
    def run(command: Sequence[str]) -> str | None:
        return outputs.get(command[0])

    return run


def test_devices_are_read_from_nvidia_smi() -> None:
    gpu = Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, "560.35.03", "9.0")
    assert list_gpus(fake_run({"nvidia-smi": SMI * 2})) == (gpu, gpu)
    assert list_gpus(fake_run({})) is None
    assert list_gpus(fake_run({"nvidia-smi": "No devices were found\n"})) == ()
    unified = list_gpus(fake_run({"nvidia-smi": "GB10, [N/A], 580.95, 12.1\n"}))
    assert unified is not None
    assert unified[0].memory_bytes == 0


@pytest.mark.parametrize(
    ("version", "cuda", "is_problem"),
    [
        ("580.65.06", "13.0", False),
        ("580.65.05", "13.0", True),
        ("590.1", "13.2", False),
        ("1000.1", "13.0", False),  # numbers, not text
        ("96.43", "12.0", True),
        ("575.57.08", "13.0", True),
        ("525.60.13", "12.8", False),
        ("520.61.05", "12.1", True),
        ("450.10", "99.0", False),  # not known: no claim
    ],
)
def test_the_driver_floor_is_that_of_the_major_version(
    version: str, cuda: str, is_problem: bool
) -> None:
    assert bool(driver_problem(version, cuda)) == is_problem


@pytest.mark.parametrize(
    ("arguments", "output", "code", "message"),
    [
        ([], {"nvidia-smi": SMI}, 1, "driver 560.35.03 is too old for CUDA 13, which needs 580.65"),
        (["12"], {"nvidia-smi": SMI}, 0, "good for CUDA 12"),
        ([], {}, 1, "a working nvidia-smi; none was found"),
        ([], {"nvidia-smi": "NVIDIA L4, 23034, 580.82.07, 8.9"}, 0, "1 x NVIDIA L4"),
    ],
)
def test_setup_checks_the_driver_first(
    arguments: list[str],
    output: dict[str, str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert driver.main(arguments, fake_run(output)) == code
    printed = capsys.readouterr()
    assert message in (printed.err if code else printed.out)


def test_compilers_are_found_by_version(tmp_path: Path) -> None:
    run = fake_run({"nvcc": "Cuda compilation tools, release 13.0, V13.0.88\n", "g++": "13.2.0\n"})
    machine = probes.probe_machine(make_config(tmp_path), run=run)
    assert (machine.nvcc, machine.gxx, machine.gpus) == ("13.0", "13.2.0", None)
    bare = probes.probe_machine(make_config(tmp_path), run=fake_run({}))
    assert (bare.nvcc, bare.gxx) == ("", "")


def test_limits_of_control_groups_above_count_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    inner = tmp_path / "cg" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner / "memory.max").write_text("8000000000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner.parent / "memory.max").write_text("max\n")
    assert probes.cpu_limit(tmp_path / "cg", own) == 1.5
    assert probes.memory_limit(tmp_path / "cg", own) == 8_000_000_000


def test_limits_of_the_older_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n2:cpu,cpuacct:/job\n")
    for controller in ("cpu", "memory"):
        (tmp_path / "cg" / controller / "job").mkdir(parents=True)
    (tmp_path / "cg/cpu/job/cpu.cfs_quota_us").write_text("400000\n")
    (tmp_path / "cg/cpu/job/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cg/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert probes.cpu_limit(tmp_path / "cg", own) == 4.0
    assert probes.memory_limit(tmp_path / "cg", own) is None
    (tmp_path / "cg/memory/job/memory.limit_in_bytes").write_text("5000000000\n")
    assert probes.memory_limit(tmp_path / "cg", own) == 5_000_000_000


def test_packages_are_compared_with_the_constraints(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["pytest>=8", "hydra-core>=1.3", "no-such-thing"]\n'
    )
    (tmp_path / "constraints.txt").write_text("# pinned\nhydra_core==0.1\nother==3\n")
    packages = probes.probe_packages(tmp_path)
    assert packages.wanted == {"pytest": "", "hydra-core": "0.1", "no-such-thing": ""}
    assert set(packages.installed) == {"pytest", "hydra-core"}


def test_the_disk_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    disk = probes.probe_disk(tmp_path / "not" / "there")
    assert disk.path == str(tmp_path)
    assert disk.is_writable
    assert 0 < disk.free < disk.total


def test_measuring_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_FILE_BYTES", 2**24)
    monkeypatch.setattr(measure, "_MATRIX", {"cpu": 64})
    disk = measure.measure_disk(probes.probe_disk(tmp_path))
    assert disk.write_rate is not None
    assert disk.read_rate is not None
    assert min(disk.write_rate, disk.read_rate) > 0
    assert list(tmp_path.iterdir()) == []
    rates = measure.measure_rates("cpu")
    assert min(rates.copy, rates.fp32, rates.bf16) > 0
    full = Disk(str(tmp_path), 2**30, 2**20)
    assert measure.measure_disk(full) is full


def test_vllm_is_looked_for_in_the_environment_that_is_named() -> None:
    assert probes.probe_vllm("/no/such/python") == ""
    assert probes.probe_vllm("python-x", run=fake_run({"python-x": "0.32.0\n"})) == "0.32.0"


@pytest.mark.parametrize(("version", "verdict"), [("0.32.0", "ok"), ("", "fail")])
def test_the_environment_that_shall_serve_is_judged(
    version: str, verdict: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    config = make_config(tmp_path, engine={"python": str(python)}, doctor={"measure": False})
    _, findings = command.examine(config)
    (found,) = [finding for finding in findings if finding.name == "vLLM"]
    assert found.verdict == verdict
    assert str(python) in found.text


def test_without_torch_the_doctor_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(measure, "_FILE_BYTES", 2**20)
    assert command.run_doctor(make_config(tmp_path, target={"path": "/some/model"})) == 1
    printed = capsys.readouterr().out
    assert "cannot be imported" in printed
    assert "fail  torch: make setup" in printed


def test_json_holds_findings_and_facts_and_the_exit_code_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--json", "doctor.measure=false", f"run.root={tmp_path / 'runs'}"]
    arguments.append("features.min_free_disk_share=0.99999")
    monkeypatch.setattr(sys, "argv", ["mtp", "doctor", *arguments])
    started = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert time.monotonic() - started < 10
    assert ended.value.code == 1
    values = json.loads(capsys.readouterr().out)
    assert values["verdict"] == "fail"
    verdicts = {finding["name"]: finding["verdict"] for finding in values["findings"]}
    assert verdicts["disk"] == "fail"
    assert verdicts["torch"] == "ok"
    assert values["machine"]["disk"]["path"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    save_llama(tmp_path / "model")
    return load_model_config(tmp_path / "model")


def test_sizes_are_those_of_the_files_and_of_the_head(tmp_path: Path, model: ModelConfig) -> None:
    import torch
    from safetensors.torch import load_file

    from mtp_train.features.codecs import bytes_per_row
    from runtime.models.loader import load_target
    from tests.unit.runtime.engine_fixtures import head_spec

    tensors = load_file(tmp_path / "model" / "model.safetensors")
    config = make_config(tmp_path)
    sizes = measure_sizes(model, config, dtype=torch.bfloat16)
    assert sizes.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert sizes.weights == 2 * sizes.parameters
    target = load_target(
        tmp_path / "model",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        cache_dir=tmp_path / "cache",
    )
    pool = target.model.new_pool(16)
    assert sizes.kv_target * 16 == pool.num_bytes()
    spec = head_spec(target)
    counted = sum(torch.Size(shape).numel() for shape in spec.tensor_shapes().values())
    assert sizes.head_parameters == counted
    for codec, size in sizes.features.items():
        assert size == pytest.approx(1e6 * bytes_per_row(codec, model.hidden_size), rel=0.3)


def judge_target(config: Config, tmp_path: Path, machine: Machine) -> dict[str, tuple[str, str]]:
    found = check_target(config, machine)
    return {finding.name: (finding.verdict, finding.text) for finding in found}


def test_a_target_that_does_not_fit_fails(tmp_path: Path, model: ModelConfig) -> None:
    config = make_config(
        tmp_path,
        target={"path": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"},
        data={"max_tokens_total": 1000},
    )
    machine = probes.probe_machine(config, run=fake_run({}))
    assert {verdict for verdict, _ in judge_target(config, tmp_path, machine).values()} == {"ok"}
    found = judge_target(config, tmp_path, machine)
    assert found["training attention"][1] == "blockwise, the device is a CPU"
    small = replace(machine, memory=replace(machine.memory, available=10**6))
    assert judge_target(config, tmp_path, small)["target"][0] == "fail"
    full = replace(machine, disk=Disk("/", 10**9, 10**5))
    verdict, text = judge_target(config, tmp_path, full)["features"]
    assert verdict == "fail"
    assert "fewer than data.max_tokens_total=1000" in text
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    verdict, text = judge_target(config, tmp_path, machine)["target"]
    assert verdict == "fail"
    assert "OtherForCausalLM" in text

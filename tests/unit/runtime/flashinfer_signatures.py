"""Signatures of the FlashInfer entry points that the runtime calls, for each version it is held to.

Recorded, so that every machine tests against every version; where the package is installed, the
recording is compared with it (``python -m tests.unit.runtime.flashinfer_signatures`` rewrites the
entry of the installed version).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[2] / "fixtures" / "flashinfer_signatures.json"
ENTRY_POINTS = (
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "merge_state",
    "decode.trtllm_batch_decode_with_kv_cache",
)
_NO_DEFAULT = {"required": True}


def recorded_versions() -> list[str]:
    return sorted(json.loads(RECORD.read_text()))


def recorded(version: str) -> dict[str, inspect.Signature]:
    """Entry point -> signature (defaults as plain values)."""
    entries = json.loads(RECORD.read_text())[version]
    return {name: _decode(parameters) for name, parameters in entries.items()}


def installed_version() -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return None
    return str(importlib.import_module("flashinfer").__version__)


def read_installed() -> dict[str, inspect.Signature]:
    """The same from the installed package itself."""
    package = importlib.import_module("flashinfer")
    signatures = {}
    for name in ENTRY_POINTS:
        found: Any = package
        parts = name.split(".")
        for part in parts:
            owner, found = found, getattr(found, part)
        signature = inspect.signature(found)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if parts[-1] == "plan" and inspect.Parameter.VAR_KEYWORD in kinds:
            # A facade that takes anything and hands it on by keyword: the names are those behind.
            signature = inspect.signature(owner._plan_impl)
        signatures[name] = _decode(_encode(signature))
    return signatures


def _encode(signature: inspect.Signature) -> list[dict[str, Any]]:
    encoded = []
    for parameter in signature.parameters.values():
        default = _NO_DEFAULT if parameter.default is parameter.empty else parameter.default
        encoded.append({"name": parameter.name, "kind": int(parameter.kind), "default": default})
    return encoded


def _decode(parameters: list[dict[str, Any]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                entry["name"],
                list(inspect._ParameterKind)[entry["kind"]],
                default=inspect.Parameter.empty
                if entry["default"] == _NO_DEFAULT
                else entry["default"],
            )
            for entry in parameters
        ]
    )


def main() -> None:
    entries = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    version = installed_version()
    assert version is not None, "flashinfer is not installed"
    entries[version] = {name: _encode(value) for name, value in read_installed().items()}
    lines = [
        f" {json.dumps(entry)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(names.items()))
        + "\n }"
        for entry, names in sorted(entries.items())
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

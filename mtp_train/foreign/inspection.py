"""A directory looked at: what it is, what it expects, what is wrong, what engines would do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train.config import ForeignConfig, HeadFormat
from mtp_train.export.reader import read_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.foreign.against_target import (
    check_against,
    check_fingerprint,
    describe_copies,
)
from mtp_train.foreign.contract import allow_quantised, compare, describe, quantised_names
from mtp_train.foreign.engines import EngineVerdict, judge
from mtp_train.foreign.files import HeadFiles, open_files
from mtp_train.foreign.findings import Finding, worst
from mtp_train.foreign.formats import FORMATS, Format
from mtp_train.foreign.readers import READERS
from mtp_train.foreign.reading import Given, Reading, layer_block
from mtp_train.foreign.recognise import Recognised, recognise
from mtp_train.foreign.sizes import TargetShape, describe_quantisation
from runtime.head_spec import WEIGHTS_NAME, load_head

# Findings of the files themselves, before a format's reader looks.
FILE_CODES = frozenset({"pickle-only", "no-weights", "file-missing", "tensor-twice"})
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Inspection:
    """``recognised`` and what follows are ``None`` for a directory of no known format."""

    directory: Path
    files: HeadFiles
    recognised: Recognised | None
    format: Format | None
    reading: Reading | None
    findings: tuple[Finding, ...]  # worst first
    engines: tuple[EngineVerdict, ...] = ()
    target: str = ""  # that it was held against; empty = none

    @property
    def has_errors(self) -> bool:
        return worst(self.findings) == "error"

    @property
    def why_not_read(self) -> str:
        """Why ``head.init`` and ``validate.head`` would refuse it; empty where they would not."""
        if self.format is None or self.reading is None:
            return "it is no known format"
        reasons = [self.format.not_read, self.reading.why_not]
        quantised = quantised_names(self.files)
        reasons += [f"its weights are quantised ({name})" for name in quantised[:1]]
        reasons += [str(error) for error in blocking(self.findings)]
        reasons += [choice.option for choice in self.reading.open_choices]
        return next((reason for reason in reasons if reason), "")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        reading = self.reading
        return {
            "directory": str(self.directory),
            "verdict": worst(self.findings) or "ok",
            "format": None
            if self.format is None or self.recognised is None
            else {
                "key": self.format.key,
                "title": self.format.title,
                "evidence": self.recognised.evidence,
                "writer": self.recognised.writer,
                "in_target": self.recognised.in_target,
            },
            "expects": dict(reading.facts) if reading is not None else {},
            "target": self.target,
            "read_here": not self.why_not_read,
            "why_not_read": self.why_not_read,
            "open_choices": [asdict(c) for c in reading.open_choices] if reading else [],
            "engines": [asdict(verdict) for verdict in self.engines],
            "findings": [asdict(finding) for finding in self.findings],
        }


# Errors of a directory that an engine stumbles over and reading it into our kinds does not.
_OF_ENGINES_ONLY = frozenset(
    {
        "d2t-absolute",
        "layer-ids-differ",
        "layer-ids",
        "layer-count",
        "rope-schemas",
        "tied",
        "norm-flag",
        "module-count",
        "module-index",
        "target-width",
    }
)


def blocking(findings: tuple[Finding, ...]) -> list[Finding]:
    """Errors that keep a head from being read here."""
    return [f for f in findings if f.severity == "error" and f.code not in _OF_ENGINES_ONLY]


def inspect_head(
    directory: Path,
    choices: ForeignConfig,
    *,
    target: TargetShape | None = None,
    cache_dir: Path | None = None,
) -> Inspection:
    """Look at ``directory``, by sizes beside ``target`` where there is one, and with ``cache_dir``
    beside its weights too (the fingerprint, copies of embedding and ``lm_head``).

    Raises ``ValueError`` for a directory that cannot be read at all.
    """
    files = open_files(directory)
    given = Given(target, choices)
    findings = _file_findings(files)
    recognised = recognise(files)
    if choices.format != "auto":
        recognised = Recognised(choices.format, f"foreign.format={choices.format}")
    if recognised is None:
        unknown = Finding(
            "error",
            "unrecognised",
            str(directory),
            "no known format of draft heads",
            ", ".join(FORMATS),
            _advise_unknown(files),
        )
        return Inspection(directory, files, None, None, None, _sorted([*findings, unknown]))
    format = FORMATS[recognised.format]
    reading = READERS[recognised.format].read(files, given)
    findings += reading.findings
    differences = None
    if reading.contract is not None and files.headers:
        contract = allow_quantised(reading.contract, files)
        differences = compare(contract, files)
        findings += describe(contract, files)
    findings += _record_findings(files, recognised.format)
    if target is not None:
        findings += check_against(reading, target, scope=describe_quantisation(files.config))
    if target is not None and cache_dir is not None:
        recorded = recorded_fingerprint(files, reading)
        findings += check_fingerprint(recorded, target.directory, cache_dir=cache_dir)
        if differences is not None and differences.is_empty:
            findings += describe_copies(reading, files, target.directory)
    return Inspection(
        directory,
        files,
        recognised,
        format,
        reading,
        _sorted(findings),
        judge(format, files, differences, findings),
        "" if target is None else str(target.directory),
    )


def recorded_fingerprint(files: HeadFiles, reading: Reading) -> str:
    """Of the target that the head says it was trained for; empty where it says nothing."""
    if files.has_record:
        try:
            return ExportRecord.read(files.directory / EXPORT_NAME).head.target_fingerprint
        except ValueError:  # said by the check of the record
            return ""
    return reading.spec.target_fingerprint if reading.spec is not None else ""


def _file_findings(files: HeadFiles) -> list[Finding]:
    findings = [
        Finding("error", "file-missing", name, "missing", "as the index says", "copy it again")
        for name in files.missing_files
    ]
    findings += [
        Finding("error", "tensor-twice", name, "in several files", "in one", "write it once")
        for name in files.repeated
    ]
    if not files.weight_files:
        value = f"only {', '.join(files.pickles)}" if files.pickles else "no weights"
        advice = (
            "pickles can run code and are never opened here; in an environment that you can throw "
            "away: torch.load(FILE, weights_only=True), then safetensors.torch.save_file(..., "
            f'"{WEIGHTS_NAME}")'
            if files.pickles
            else "copy the weights beside config.json"
        )
        code = "pickle-only" if files.pickles else "no-weights"
        findings.append(Finding("error", code, "weights", value, "safetensors", advice))
    elif files.pickles:
        findings.append(
            Finding(
                "note",
                "pickle-beside",
                ", ".join(files.pickles),
                "not read",
                "",
                "engines prefer the safetensors too; delete it",
            )
        )
    return findings


def _record_findings(files: HeadFiles, format: HeadFormat) -> list[Finding]:
    """Whether what we wrote is still what we wrote."""
    try:
        if files.has_record:
            read_export(files.directory)
        elif format == "native" and files.headers:
            load_head(files.directory)
    except ValueError as error:
        field = EXPORT_NAME if files.has_record else "config.json"
        return [
            Finding("error", "changed", field, str(error), "as it was written", "write it again")
        ]
    return []


def _advise_unknown(files: HeadFiles) -> str:
    announced = layer_block(files.config)[0].get("num_nextn_predict_layers")
    if announced:
        return (
            f"config.json announces {announced} MTP module(s) and none is there: a fine-tune that "
            "lost them; look at the base checkpoint"
        )
    return "say which it is: as=FORMAT"


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))

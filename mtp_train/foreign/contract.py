"""The tensors that a directory has to have, and what of that it has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Contract:
    """Names as they are in the directory. ``ignored``: there and not the head's, or spoken of
    elsewhere.
    """

    required: Mapping[str, Shape]
    optional: Mapping[str, Shape] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Differences:
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)


def compare(contract: Contract, files: HeadFiles) -> Differences:
    known = {**contract.required, **contract.optional}
    there = files.headers
    return Differences(
        missing=tuple(name for name in contract.required if name not in there),
        unexpected=tuple(sorted(n for n in there if n not in known and n not in contract.ignored)),
        misshapen=tuple(
            name for name, shape in known.items() if name in there and there[name].shape != shape
        ),
    )


def describe(contract: Contract, files: HeadFiles) -> list[Finding]:
    """One finding per tensor that is missing, unexpected or of another shape."""
    differences = compare(contract, files)
    known = {**contract.required, **contract.optional}
    findings = [
        Finding(
            "error",
            "tensor-missing",
            name,
            "missing",
            f"{list(contract.required[name])}",
            "export the head again; an engine that loads it drafts with what memory holds",
        )
        for name in differences.missing
    ]
    findings += [
        Finding(
            "error",
            "tensor-shape",
            name,
            f"{list(files.headers[name].shape)}",
            f"{list(known[name])}",
            _explain_shape(files.headers[name].shape, known[name]),
        )
        for name in differences.misshapen
    ]
    findings += [
        Finding(
            "error",
            "tensor-unexpected",
            name,
            f"{list(files.headers[name].shape)}",
            "no tensor of this name",
            "leave it out, or say which format this is (as=...)",
        )
        for name in differences.unexpected
    ]
    return findings


def _explain_shape(found: Shape, expected: Shape) -> str:
    if len(found) == 2 and found == expected[::-1]:
        return "it is transposed: linear weights are [out, in]"
    return "config.json and weights do not belong together"

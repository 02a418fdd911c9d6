"""The tensors that a directory has to have, and what of that it has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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


QUANTISED_SUFFIXES = (
    *(".weight_scale", ".weight_scale_inv", ".input_scale", ".weight_packed", ".weight_shape"),
    *(".weight_zero_point", ".weight_g_idx", ".qweight", ".qzeros", ".scales", ".g_idx"),
)
_IN_PLACE_OF_WEIGHT = (".weight_packed", ".qweight")


def quantised_names(files: HeadFiles) -> list[str]:
    """Tensors that only a quantised checkpoint has."""
    return sorted(name for name in files.headers if name.endswith(QUANTISED_SUFFIXES))


def allow_quantised(contract: Contract, files: HeadFiles) -> Contract:
    """``contract`` for weights that are stored quantised: packed ones stand for the weight, and
    scales belong to it. Their shapes are not checked.
    """
    names = quantised_names(files)
    packed = {
        name.removesuffix(suffix) + ".weight"
        for name in names
        for suffix in _IN_PLACE_OF_WEIGHT
        if name.endswith(suffix)
    }
    required = {name: shape for name, shape in contract.required.items() if name not in packed}
    return replace(contract, required=required, ignored=contract.ignored | set(names))


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

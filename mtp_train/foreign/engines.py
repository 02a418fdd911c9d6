"""What vLLM and SGLang would do with a directory, read from their loaders and not tried.

A loader takes badly what it does not expect in three ways: vLLM stops at a tensor it does not know;
both leave a linear that no file fills as it was allocated, and a norm at ones; SGLang skips what it
does not know. That it loads proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mtp_train.export.layouts import LAYOUTS
from mtp_train.export.layouts.base import METHODS_IN_PATHS
from mtp_train.foreign.contract import Differences
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding
from mtp_train.foreign.formats import Engine, Format
from mtp_train.foreign.reading import layer_block

Outcome = Literal["loads", "loads, drafts wrongly", "refuses", "cannot"]
ENGINES: tuple[Engine, ...] = ("vLLM", "SGLang")
_MOST_NAMED = 3
_FUSIONS = ("eh_proj.weight", "input_proj.weight", "mtp.fc.weight")
# Findings that an engine does not notice and that spoil what it drafts.
_SPOILS: Mapping[Engine, frozenset[str]] = MappingProxyType(
    {
        "vLLM": frozenset(
            {
                "d2t-absolute",
                "lm-head-rows",
                "rope-schemas",
                "norm-flag",
                "layer-order",
                "d2t-values",
            }
        ),
        "SGLang": frozenset(
            {
                "d2t-absolute",
                "lm-head-rows",
                "rope-schemas",
                "norm-flag",
                "d2t-values",
                "d2t-permutes",
                "tied",
            }
        ),
    }
)
_STOPS: Mapping[Engine, frozenset[str]] = MappingProxyType(
    {
        "vLLM": frozenset(
            {
                "d2t-whole-vocabulary",
                "lm-head-shipped",
                "config-key",
                "target-hidden-size",
                "target-width",
                "layer-count",
                "module-index",
                "module-count",
            }
        ),
        "SGLang": frozenset(
            {"draft-vocab-size", "config-key", "target-hidden-size", "target-width", "layer-count"}
        ),
    }
)


@dataclass(frozen=True)
class EngineVerdict:
    """``why``: at least one line where the outcome is not ``loads``."""

    engine: Engine
    outcome: Outcome
    why: tuple[str, ...] = ()


def judge(
    format: Format,
    files: HeadFiles,
    differences: Differences | None,
    findings: Sequence[Finding],
) -> tuple[EngineVerdict, ...]:
    """One verdict per engine. ``differences``: ``None`` where no contract could be made."""
    return tuple(_judge(engine, format, files, differences, findings) for engine in ENGINES)


def _judge(
    engine: Engine,
    format: Format,
    files: HeadFiles,
    differences: Differences | None,
    findings: Sequence[Finding],
) -> EngineVerdict:
    if engine in format.refused_by:
        return EngineVerdict(engine, "cannot", (f"{engine} {format.refused_by[engine]}",))
    stops: list[str] = []
    spoils: list[str] = []
    if not files.headers:
        stops.append("there are no safetensors to check; a pickle it would load unseen")
    if differences is not None:
        _judge_tensors(engine, format, differences, stops, spoils)
    for finding in findings:
        if finding.code in _STOPS[engine]:
            stops.append(str(finding))
        if finding.code in _SPOILS[engine]:
            spoils.append(str(finding))
    notes = _by_format(engine, format, files, stops, spoils)
    if stops:
        return EngineVerdict(engine, "refuses", (*stops, *spoils))
    if spoils:
        return EngineVerdict(engine, "loads, drafts wrongly", (*spoils, *notes))
    return EngineVerdict(engine, "loads", tuple(notes))


def _judge_tensors(
    engine: Engine,
    format: Format,
    differences: Differences,
    stops: list[str],
    spoils: list[str],
) -> None:
    norms = [name for name in differences.missing if "norm" in name]
    linears = [name for name in differences.missing if "norm" not in name]
    fusions = [name for name in linears if name.endswith(_FUSIONS)]
    if differences.misshapen:
        stops.append(f"{_named(differences.misshapen)}: of another shape than its parameter")
    if differences.unexpected:
        if engine == "SGLang":
            spoils.append(f"skips {_named(differences.unexpected)} without a word")
        else:
            stops.append(f"{_named(differences.unexpected)}: it has no such parameter")
    is_strict = engine == "vLLM" and format.family == "mtp"
    if norms and is_strict:
        stops.append(f"{_named(norms)}: missing")
    elif norms:
        spoils.append(f"{_named(norms)}: missing, stays at ones without a word")
    if fusions and is_strict:
        stops.append(f"{_named(fusions)}: missing")
    rest = [name for name in linears if not (is_strict and name in fusions)]
    if rest:
        spoils.append(f"{_named(rest)}: missing, stays uninitialised memory without a word")


def _by_format(
    engine: Engine, format: Format, files: HeadFiles, stops: list[str], spoils: list[str]
) -> list[str]:
    """What a format alone brings; returns what is good to know and spoils nothing."""
    notes: list[str] = []
    config, names = files.config, files.headers
    if engine == "vLLM":
        _vllm_path(format, files, notes)
    if format.key == "eagle":
        _eagle(engine, files, stops, spoils)
    if format.key == "medusa" and engine == "vLLM":
        _medusa(files, stops, notes)
    if format.key in ("eagle3", "speculators_eagle3"):
        _eagle3(engine, files, spoils, notes)
    if format.key in ("mimo", "deepseek_mtp") and engine == "vLLM":
        notes.append(
            "a target without num_nextn_predict_layers needs --hf-overrides "
            "'{\"num_nextn_predict_layers\": 1}'"
        )
    if format.key == "deepseek_mtp" and engine == "SGLang":
        if not any(".mlp.experts." in name for name in names):
            stops.append("its DeepSeek module has experts, this one a dense MLP")
        notes.append("does not zero the embedding of position 0")
    if config.get("quantization_config") is None and any(
        header.dtype.startswith(("F8", "I8", "U8")) for header in names.values()
    ):
        spoils.append("weights are quantised and config.json has no quantization_config")
    return notes


def _vllm_path(format: Format, files: HeadFiles, notes: list[str]) -> None:
    path = str(files.directory.absolute()).lower()
    reserved: tuple[str, ...] = METHODS_IN_PATHS
    for layout in LAYOUTS.values():
        if layout.name == format.key:
            reserved = layout.reserved_in_paths
    if format.family == "none" or format.key in ("dflash", "dspark"):
        return
    for part in reserved:
        if part in path:
            notes.append(
                f"takes a path with {part!r} in it for another method unless told one of EAGLE's"
            )


def _eagle(engine: Engine, files: HeadFiles, stops: list[str], spoils: list[str]) -> None:
    """The one tensor that the engines contradict each other about."""
    has_bias = "fc.bias" in files.headers
    if engine == "vLLM" and has_bias:
        stops.append("fc.bias: its fc has no bias (mtp export format=eagle writes none)")
    norms = [n for n in ("layers.0.input_layernorm.weight", "norm.weight") if n in files.headers]
    is_mistral = "Mistral" in str(files.config.get("architectures"))
    if norms and engine == "vLLM" and not is_mistral:
        stops.append(f"{_named(norms)}: only its Mistral class has them")
    if norms and engine == "SGLang":
        spoils.append(f"skips {_named(norms)} without a word")
    if engine == "SGLang" and not has_bias:
        spoils.append(
            "fc.bias: missing, its fc has one that stays uninitialised memory (zeros will do; mtp "
            "export format=eagle_sglang writes them)"
        )


def _medusa(files: HeadFiles, stops: list[str], notes: list[str]) -> None:
    if not any(name.startswith("blocks.") for name in files.headers):
        stops.append("its Medusa class reads blocks.* only (mtp export format=medusa writes them)")
    elif not any(name.startswith("lm_head") for name in files.headers):
        stops.append("lm_head.weight: missing, its draft model has no way to the target's")
    if files.config.get("model_type") != "medusa":
        stops.append("model_type: it takes the class from model_type=medusa")
    notes.append("drafts with uninitialised blocks when K is above their number")


def _eagle3(engine: Engine, files: HeadFiles, spoils: list[str], notes: list[str]) -> None:
    names, width = files.headers, layer_block(files.config)[0].get("hidden_size")
    if engine == "SGLang":
        biases = [name for name in names if name.endswith("_proj.bias")]
        norms = [name for name in names if name.endswith(("q_norm.weight", "k_norm.weight"))]
        if biases or norms:
            spoils.append(f"{_named([*biases, *norms])}: not computed by its EAGLE-3 layer")
        if files.config.get("norm_before_residual") is True:
            spoils.append("norm_before_residual: its layer has no normed residual")
        is_narrower = files.config.get("target_hidden_size", width) != width
        if "embed_tokens.weight" in names and not is_narrower:
            notes.append("puts the target's embedding in the place of embed_tokens.weight")
    if "t2d" in names:
        notes.append("drops t2d")


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

"""Which residual streams an EAGLE-3 head reads, as each engine understands its ``config.json``.

vLLM reads ``eagle_aux_hidden_state_layer_ids`` at the top level, as k of ``S_k``; SGLang the same
key within ``eagle_config``, as k - 1. Without it both take 2, N // 2, N - 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_train.export.layouts.eagle3 import default_layer_ids
from mtp_train.foreign.findings import Finding, OpenChoice
from mtp_train.foreign.reading import Given

KEY = "eagle_aux_hidden_state_layer_ids"
COUNT_KEY = "num_aux_hidden_states"
_DEFAULT_COUNT = 3
_OPTION = "foreign.layer_ids=[k,...]"


@dataclass(frozen=True)
class LayerSources:
    """``ids``: k of ``S_k``; empty where they are not known. ``count``: how many ``fc`` reads."""

    ids: tuple[int, ...]
    count: int
    findings: tuple[Finding, ...] = ()
    open_choices: tuple[OpenChoice, ...] = ()


def read_layer_sources(
    config: Mapping[str, Any], block: Mapping[str, Any], given: Given, *, is_speculators: bool
) -> LayerSources:
    """``block``: the object with the decoder layer's keys, which may be ``config`` itself."""
    findings: list[Finding] = []
    top = _ids(config, KEY, KEY, findings)
    nested_config = config.get("eagle_config")
    nested = (
        _ids(nested_config, KEY, f"eagle_config.{KEY}", findings)
        if isinstance(nested_config, Mapping)
        else None
    )
    stated = config.get(COUNT_KEY, block.get(COUNT_KEY))
    named = top or nested
    count = stated if type(stated) is int and stated > 0 else len(named or ()) or _DEFAULT_COUNT
    if given.choices.layer_ids:
        return LayerSources(given.choices.layer_ids, len(given.choices.layer_ids), tuple(findings))
    if named and len(named) != count:
        findings.append(
            Finding(
                "error",
                "layer-count",
                COUNT_KEY,
                str(count),
                f"{len(named)}, as many as {KEY} names",
                "engines size fc by the one and capture by the other; make them agree",
            )
        )
    defaults = None if given.target is None else default_layer_ids(given.target.num_layers)
    if top is None and nested is None:
        return _unnamed(count, defaults, findings)
    ids: tuple[int, ...] = top or ()
    more: tuple[OpenChoice, ...] = ()
    if not is_speculators:
        ids, more = _named(top, nested, defaults, given, findings)
    if list(ids) != sorted(set(ids)):
        findings.append(
            Finding(
                "error",
                "layer-order",
                KEY,
                str(list(ids)),
                "ascending, each once",
                "vLLM sorts them, so columns of fc would meet other layers; reorder both",
            )
        )
        ids = ()
    return LayerSources(ids, count, tuple(findings), more)


def _unnamed(count: int, defaults: tuple[int, ...] | None, findings: list[Finding]) -> LayerSources:
    if count != _DEFAULT_COUNT:
        findings.append(
            Finding(
                "error",
                "layer-ids",
                KEY,
                "missing",
                f"{count} ids",
                f"engines read 3 layers by default, fc has {count}; name them",
            )
        )
        question = f"which {count} residual streams fc reads"
        return LayerSources((), count, tuple(findings), (OpenChoice(_OPTION, question),))
    shown = "2, N // 2, N - 3" if defaults is None else ", ".join(map(str, defaults))
    findings.append(
        Finding(
            "note",
            "layer-ids",
            KEY,
            "missing",
            "",
            f"engines read S_k of k = {shown}; {_OPTION} says otherwise",
        )
    )
    return LayerSources(defaults or (), count, tuple(findings))


def _named(
    top: tuple[int, ...] | None,
    nested: tuple[int, ...] | None,
    defaults: tuple[int, ...] | None,
    given: Given,
    findings: list[Finding],
) -> tuple[tuple[int, ...], tuple[OpenChoice, ...]]:
    after = None if nested is None else tuple(k + 1 for k in nested)
    if top is not None and after is not None and top != after:
        findings.append(
            Finding(
                "error",
                "layer-ids-differ",
                f"{KEY}, eagle_config.{KEY}",
                f"{list(top)}, {list(nested or ())}",
                "k and k - 1",
                f"vLLM reads S_k of {list(top)}, SGLang of {list(after)}; keep those that the head "
                "was trained on",
            )
        )
        return (), (OpenChoice(_OPTION, f"whether fc reads S_k of {list(top)} or {list(after)}"),)
    if top is not None and after is None and top != defaults:
        known = "its default" if defaults is None else str(list(defaults))
        findings.append(
            Finding(
                "warning",
                "layer-ids-vllm-only",
                f"eagle_config.{KEY}",
                "missing",
                str([k - 1 for k in top]),
                f"SGLang reads {known} instead; write both keys",
            )
        )
    if top is None and after is not None and after != defaults:
        known = "2, N // 2, N - 3" if defaults is None else str(list(defaults))
        findings.append(
            Finding(
                "warning",
                "layer-ids-sglang-only",
                KEY,
                "missing",
                str(list(after)),
                f"vLLM's default runner reads S_k of {known} instead; write both keys",
            )
        )
    if top is None and given.target is not None and "deepseek" in given.target.model_type:
        findings.append(
            Finding(
                "warning",
                "layer-ids-deepseek",
                f"eagle_config.{KEY}",
                str(list(nested or ())),
                "",
                "on DeepSeek targets SGLang counts these from k or from k - 1; check, and say "
                f"{_OPTION}",
            )
        )
    return top or after or (), ()


def _ids(
    config: Mapping[str, Any], key: str, shown: str, findings: list[Finding]
) -> tuple[int, ...] | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, list) and value and all(type(k) is int and k >= 0 for k in value):
        return tuple(value)
    findings.append(
        Finding("error", "layer-ids", shown, repr(value), "a list of layer numbers", "correct it")
    )
    return None

"""Our contracts of targets and of their MTP modules against published lists of tensors, both ways.

Names, shapes, totals and where they are from: ``tests/fixtures/published_mtp.json``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mtp_train.native.names import SHARED_COPIES, layout_of, stored_name
from mtp_train.native.reader import native_spec
from runtime.layer_parts import CORRECTION_BIAS
from runtime.models.config import ModelConfig, parse_config
from runtime.models.stored_tensors import stored_shapes
from tests.unit.native.checkpoints import DEEPSEEK_NAMES, MIMO_NAMES
from tests.unit.native.test_native import mimo_config, published_v3

PUBLISHED = json.loads((Path(__file__).parents[2] / "fixtures" / "published_mtp.json").read_text())
Shapes = dict[str, tuple[int, ...]]


def config_of(kind: str) -> ModelConfig:
    if kind == "mimo":
        return mimo_config()
    return parse_config(published_v3(), generation={}, source="conf")


def module_shapes(config: ModelConfig) -> Shapes:
    """Of the checkpoint's own MTP module, under its names, with copies that it may hold."""
    (prefix,) = config.native_prefixes
    layout = layout_of(config)
    spec = native_spec(config, fingerprint="", source="conf")
    shapes = {
        stored_name(name, layout=layout, prefix=prefix): shape
        for name, shape in spec.tensor_shapes().items()
    }
    if layout == "deepseek":
        shapes |= dict.fromkeys(
            (prefix + name for name in SHARED_COPIES), (config.vocab_size, config.hidden_size)
        )
    return shapes


def published_names(kind: str) -> set[str]:
    facts = PUBLISHED[kind]
    return {
        facts["prefix"] + name.replace("*", str(index))
        for name in facts["names"]
        for index in range(facts["num_experts"] if "*" in name else 1)
    }


def stored(config: ModelConfig, facts: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and bytes of every tensor that the published checkpoint has by our contracts.

    Linears are block-fp8 but for those that are listed as published unquantised, ``lm_head`` and
    the router, which the format always leaves out.
    """
    plain = (*facts.get("unquantised", ()), "lm_head.weight", "mlp.gate.weight")
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, shape in (config.tensor_shapes() | module_shapes(config)).items():
        scheme = config.quantisation and len(shape) == 2 and config.quantisation.scheme_of(name)
        if not scheme or name.endswith(plain):
            width = 4 if name.endswith(CORRECTION_BIAS) else 2
            found[name] = (shape, math.prod(shape) * width)
            continue
        assert config.quantisation is not None
        for part, (size, *_) in stored_shapes(name, shape, scheme, config.quantisation).items():
            found[part] = (size, math.prod(size) * (1 if part == name else 4))
    return found


@pytest.mark.parametrize("kind", ["deepseek", "mimo"])
def test_the_module_has_the_published_names_and_no_others(kind: str) -> None:
    assert set(module_shapes(config_of(kind))) == published_names(kind)


@pytest.mark.parametrize("kind", ["deepseek", "mimo"])
def test_all_tensors_are_as_many_bytes_as_published(kind: str) -> None:
    facts = PUBLISHED[kind]
    found = stored(config_of(kind), facts)
    assert sum(size for _, size in found.values()) == facts["num_bytes"]
    assert len(found) == facts.get("num_tensors", len(found))


def test_shapes_are_the_published_ones() -> None:
    facts = PUBLISHED["deepseek"]
    found = stored(config_of("deepseek"), facts)
    assert {name: list(found[name][0]) for name in facts["shapes"]} == facts["shapes"]


def test_tiny_checkpoints_of_the_tests_have_the_published_names() -> None:
    facts = PUBLISHED["deepseek"]
    assert set(DEEPSEEK_NAMES) == {name for name in facts["names"] if "*" not in name}
    assert set(MIMO_NAMES) == set(PUBLISHED["mimo"]["names"])


def test_layer_61_counts_what_deepseek_states() -> None:
    spec = native_spec(config_of("deepseek"), fingerprint="", source="conf")
    count = sum(map(math.prod, spec.tensor_shapes().values()))
    assert count / 11.5e9 == pytest.approx(1, abs=0.01)  # README_WEIGHTS.md of DeepSeek-V3

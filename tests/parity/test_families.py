"""The ladder over targets of other families, and heads whose layers are computed only in part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_train.validate import p1, p2, p4
from runtime.models.heads.mtp import MtpHead
from tests.parity.test_mutants import (
    PROMPTS,
    SEQUENCES,
    SMALL_P4,
    K,
    MisreadSubject,
    climb_p0,
    climb_p3,
)
from tests.unit.runtime.engine_fixtures import PLAIN
from tests.unit.validate.subjects import make_subject


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family_is_green(tmp_path: Path, family: str) -> None:
    subject = make_subject(tmp_path, family=family)
    assert climb_p0(subject).passed
    assert p1.check(subject, SEQUENCES).passed
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed


@pytest.mark.parametrize(
    ("family", "is_plain"),
    [
        ("qwen3moe", False),
        ("deepseekv2", False),
        ("deepseekv3", False),
        ("qwen3moe", True),
        ("deepseekv2", True),
    ],
)
def test_experts_and_latent_attention_are_green_with_a_head_of_either_kind(
    tmp_path: Path, family: str, is_plain: bool
) -> None:
    subject = make_subject(tmp_path, family=family, **(PLAIN if is_plain else {}))
    assert climb_p0(subject).passed
    assert p1.check(subject, SEQUENCES).passed
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed


def forget_head_norms(head: MtpHead) -> None:
    for block in head.blocks:
        block.attention.q_norm = block.attention.k_norm = block.fused = None


def swap_head_norms(head: MtpHead) -> None:
    for block in head.blocks:
        attention, block.fused = block.attention, None
        attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def forget_biases(head: MtpHead) -> None:
    for block in head.blocks:
        block.attention.qkv._bias = block.fused = None


def forget_yarn_in_scores(head: MtpHead) -> None:
    for block in head.blocks:
        block.attention.spec = replace(block.attention.spec, scale=0.1)


def forget_the_bias_of_the_choice(head: MtpHead) -> None:
    for block in head.blocks:
        block.mlp.router._bias = None


def forget_shared_experts(head: MtpHead) -> None:
    for block in head.blocks:
        block.mlp.shared = None


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", forget_head_norms),
        ("qwen3", swap_head_norms),
        ("qwen2", forget_biases),
        ("deepseekv2", forget_yarn_in_scores),
        ("deepseekv2", forget_shared_experts),
        ("deepseekv3", forget_the_bias_of_the_choice),
    ],
)
def test_p2_sees_parts_of_the_layer_that_are_not_computed(
    tmp_path: Path, family: str, change: Callable[[MtpHead], None]
) -> None:
    subject = make_subject(tmp_path, kind=MisreadSubject, family=family)
    assert isinstance(subject, MisreadSubject)
    subject.change = change
    assert not p2.check(subject, SEQUENCES, k=3).passed

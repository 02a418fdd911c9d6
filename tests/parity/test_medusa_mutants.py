"""Medusa heads on the ladder: a correct one is green, blocks that are read differently are seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.validate import p2, p4
from runtime.batch import ForwardBatch
from runtime.models.heads.medusa import MedusaHead
from runtime.models.heads.mtp import MtpHead
from tests.parity.test_mutants import (
    PROMPTS,
    SEQUENCES,
    SMALL_P4,
    K,
    climb_p3,
    hidden_of_the_row_before,
    tied_head,
    with_head,
)
from tests.unit.runtime.engine_fixtures import MEDUSA


@pytest.mark.parametrize(
    "changes", [{"projection_bias": False}, {}, {"lm_head": "own"}], ids=["no bias", "bias", "own"]
)
def test_a_medusa_head_is_green(tmp_path: Path, changes: dict[str, Any]) -> None:
    subject = with_head(tmp_path, **MEDUSA | changes)
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed


def blocks_in_another_order(head: MtpHead) -> None:
    forward = head.forward

    def other(batch: ForwardBatch, *args: Any) -> torch.Tensor:
        return forward(batch, *args).roll(head.spec.hidden_size, dims=1)

    head.forward = other  # type: ignore[method-assign]


def stays_at_its_block(head: MtpHead) -> None:
    forward = head.forward

    def other(batch: ForwardBatch, *args: Any) -> torch.Tensor:
        assert batch.hidden_ND is not None
        is_own = batch.hidden_ND.shape[1] == head.width
        return batch.hidden_ND if is_own else forward(batch, *args)

    head.forward = other  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change", [tied_head, hidden_of_the_row_before, blocks_in_another_order, stays_at_its_block]
)
def test_p2_sees_a_medusa_head_that_is_read_differently(
    tmp_path: Path, change: Callable[[MtpHead], None]
) -> None:
    subject = with_head(tmp_path, **MEDUSA)
    subject.change = change
    assert not p2.check(subject, SEQUENCES, k=3).passed


def always_the_first_lm_head(head: MtpHead) -> None:
    assert isinstance(head, MedusaHead)
    head.lm_heads = [head.lm_heads[0]] * len(head.lm_heads)


def test_p2_sees_a_block_that_is_read_by_anothers_lm_head(tmp_path: Path) -> None:
    subject = with_head(tmp_path, **MEDUSA, lm_head="own")
    subject.change = always_the_first_lm_head
    assert not p2.check(subject, SEQUENCES, k=3).passed

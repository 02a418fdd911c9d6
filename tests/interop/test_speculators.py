"""EAGLE-3 heads in the format of the ``speculators`` library, opened and computed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.config import HeadConfig
from mtp_train.validate import p2
from mtp_train.validate.subject import relative_error
from mtp_train.validate.unroll import runtime_chain
from tests.interop.test_eagle import EAGLE3
from tests.interop.tiny_heads import REDUCED, TinyHead, make_tiny_bench, prompts

pytest.importorskip("speculators", reason="the speculators library is not installed here")
pytestmark = pytest.mark.interop

_NUM_STEPS = 3
HEADS = {
    "plain": TinyHead("speculators", HeadConfig(**EAGLE3, layer_ids=(1, 2, 3))),
    "reduced_normed": TinyHead(
        "speculators",
        HeadConfig(
            **EAGLE3,
            layer_ids=(1, 3),
            fusion_norm="each",
            norm_before_residual=True,
            draft_vocab_size=len(REDUCED),
        ),
        ids=REDUCED,
    ),
    "joined_post_norm": TinyHead(
        "speculators",
        HeadConfig(**EAGLE3 | {"recycle": "post_norm"}, layer_ids=(3,), fusion_norm="joined"),
    ),
}


def open_in_library(directory: Path) -> Any:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(directory, config=config).float().eval()


@pytest.mark.parametrize("name", sorted(HEADS))
def test_the_library_computes_the_same_chained_logits(name: str, tmp_path: Path) -> None:
    bench = make_tiny_bench(tmp_path, HEADS[name])
    subject = bench.subject(torch.float32)
    model = open_in_library(bench.export_dir)
    (text,) = prompts(count=1, seed=7)
    (sequence,) = p2.hidden_sequences(subject, [text * 2], torch.float32)
    starts = range(len(sequence.input_ids) - 1 - _NUM_STEPS)
    ours = runtime_chain(subject.head(torch.float32), sequence, starts, _NUM_STEPS)
    assert sequence.layers is not None
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    with torch.no_grad():
        model(
            hidden_states=sequence.layers[None, :-1],
            input_ids=sequence.input_ids[None, 1:],
            document_ids=torch.zeros(1, len(sequence.input_ids) - 1, dtype=torch.int64),
            ttt_steps=_NUM_STEPS,
        )
    assert len(seen) == _NUM_STEPS
    for step, logits_TW in zip(ours, seen, strict=True):
        assert relative_error(step.logits_SV, logits_TW[: len(starts)]) < 1e-4
    if HEADS[name].ids:
        ids_W = torch.arange(len(REDUCED)) + model.d2t
        assert ids_W.tolist() == list(REDUCED)
        assert model.t2d.nonzero()[:, 0].tolist() == list(REDUCED)

"""An interrupted run goes on under later versions: no new key of a default enters its record.

Whoever adds a setting names it in ``resume_settings``; these sets are of before that was kept.
"""

from __future__ import annotations

import dataclasses

from mtp_train.config import HeadConfig, LossConfig, TrainerConfig
from mtp_train.resume_settings import _without_later_defaults, head_settings

HEAD = {
    *("kind", "num_layers", "init", "concat", "recycle", "first_embedding_mask"),
    *("projection_bias", "norms", "layer_ids", "fusion_norm", "norm_before_residual"),
    "draft_vocab_size",
}
LOSS = {
    *("hidden_weight", "logit_weight", "num_unroll_steps", "step_decay", "sub_vocab_size"),
    *("tail_sample_size", "row_chunk", "vocab_chunk"),
}
TRAINER = {
    *("epochs", "max_steps", "tokens_per_step", "gradient_accumulation", "learning_rate"),
    *("schedule", "warmup_share", "decay_share", "min_lr_share", "betas", "weight_decay"),
    *("clip_norm", "dtype", "attention", "activation_checkpointing", "checkpoint_every"),
    *("keep_last", "validate_every", "log_every", "max_nonfinite_run", "wandb", "tensorboard"),
}


def test_defaults_of_later_keys_are_not_recorded() -> None:
    assert set(head_settings(HeadConfig(), ())) == HEAD
    assert set(_without_later_defaults(LossConfig())) == LOSS
    assert set(_without_later_defaults(TrainerConfig())) == TRAINER


def test_other_values_of_later_keys_are_recorded() -> None:
    changed = head_settings(HeadConfig(kind="medusa", num_layers=0, num_blocks=3), ())
    assert changed["num_blocks"] == 3
    trainer = dataclasses.replace(TrainerConfig(), optimizer="muon")
    assert _without_later_defaults(trainer)["optimizer"] == "muon"

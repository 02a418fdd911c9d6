"""The settings of a preflight: the user's own, with everything made small, and a run of its own."""

from __future__ import annotations

from dataclasses import replace

from mtp_train.config import Config
from mtp_train.run_dir import RunDirectory

NAME = "preflight"
_MAX_STEP_TOKENS = 4096  # of one forward and backward pass
_STEPS_PER_EPOCH = 2


def preflight_config(config: Config) -> Config:
    """``config`` for the run ``runs/<name>/preflight``: a few first turns of the user's
    conversations, answered greedily by the target; one unroll step; no validation split.

    Everything that decides whether the line is right stays the user's: target, dtype, template,
    head, codec, loss weights, format.
    """
    data, preflight = config.data, config.preflight
    limits = [n for n in (data.max_prompt_tokens, preflight.max_prompt_tokens) if n]
    max_prompt = min(limits)
    return replace(
        config,
        run=replace(config.run, name=NAME, root=str(RunDirectory.from_config(config).root)),
        data=replace(
            data,
            path="",
            max_conversations=preflight.num_prompts,
            max_tokens_total=0,
            min_tokens=1,
            max_tokens=min(max_prompt + preflight.max_tokens, config.runtime.max_model_len),
            max_prompt_tokens=max_prompt,
            max_answer_tokens=0,
            cut_long_answers=False,
            max_turns=1,
            validation_share=0.0,
            regenerate=replace(
                data.regenerate,
                enabled=True,
                temperature=0.0,
                max_tokens=preflight.max_tokens,
                drop_cut_off=False,
                capture_features=False,
            ),
        ),
        features=replace(config.features, path=""),
        validate=replace(config.validate, head=""),
        loss=replace(config.loss, kind="soft_ce", num_unroll_steps=1, step_decay=1.0),
        trainer=replace(
            config.trainer,
            max_steps=preflight.steps,
            learning_rate=preflight.learning_rate,
            schedule="linear",
            warmup_share=0.05,
            min_lr_share=0.0,
            checkpoint_every=preflight.steps,
            keep_last=1,
            validate_every=0,
            patience=0,
            feature_noise=0.0,
            wandb="disabled",
            tensorboard=False,
        ),
        export=replace(config.export, unvalidated=True, check=""),
    )


def training_config(config: Config, *, num_tokens: int) -> Config:
    """``config`` of :func:`preflight_config` for a token set of ``num_tokens``: every row is seen
    once in two steps, so that the number of steps decides how well it is learnt by heart.
    """
    step_tokens = max(1, -(-num_tokens // _STEPS_PER_EPOCH))
    return replace(
        config,
        trainer=replace(
            config.trainer,
            tokens_per_step=step_tokens,
            gradient_accumulation=-(-step_tokens // _MAX_STEP_TOKENS),
        ),
    )

"""A whole model that drafts instead of a head: opened, and checked to speak the target's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtp_train.config import Config
from mtp_train.features.target import cache_directory, load_tokenizer
from runtime.models.config import load_config
from runtime.models.layer_drop import keep_layers
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target, load_target, resolve_target


def open_draft_model(config: Config, target: Target, tokenizer: Any) -> LlamaModel:
    """``generate.draft_model`` with ``generate.draft_layers`` of its layers, beside ``target``.

    Without a path, or with the target's own, the layers are the target's and share its weights.
    Raises ``ValueError`` when the vocabularies differ, before any weights are read.
    """
    settings = config.generate
    model = target.model
    if settings.draft_model:
        cache_dir = cache_directory(config.target)
        try:
            directory = resolve_target(settings.draft_model, cache_dir=cache_dir)
            if directory.resolve() != target.path.resolve():
                theirs = load_tokenizer(replace(config.target, path=str(directory)), directory)
                size = load_config(directory).vocab_size
                check_vocabulary(tokenizer, target.config.vocab_size, theirs, size)
                model = load_target(
                    directory, dtype=model.dtype, device=model.device, cache_dir=cache_dir
                ).model
        except ValueError as error:
            raise ValueError(f"generate.draft_model={settings.draft_model}: {error}") from error
    if not settings.draft_layers:
        return model
    try:
        return keep_layers(model, settings.draft_layers)
    except ValueError as error:
        raise ValueError(f"generate.draft_{error}") from error


def check_vocabulary(ours: Any, our_size: int, theirs: Any, their_size: int) -> None:
    """Raise ``ValueError`` unless every id is the same token to both tokenizers (``theirs``: the
    draft's) and both models have as many logits.
    """
    ours_by_id = {index: token for token, index in ours.get_vocab().items()}
    theirs_by_id = {index: token for token, index in theirs.get_vocab().items()}
    differing = [
        index
        for index in sorted(ours_by_id.keys() | theirs_by_id.keys())
        if ours_by_id.get(index) != theirs_by_id.get(index)
    ]
    needed = "a draft model is given the target's token ids and needs the same vocabulary"
    if differing:
        index = differing[0]
        raise ValueError(
            f"{len(differing)} of {len(ours_by_id)} token ids are other tokens than the target's, "
            f"the first is {index} ({theirs_by_id.get(index)!r} there, "
            f"{ours_by_id.get(index)!r} in the target); {needed}"
        )
    if our_size != their_size:
        raise ValueError(
            f"its vocab_size is {their_size}, the target's {our_size} (the tokens are the same, "
            f"the padding is not); {needed}"
        )

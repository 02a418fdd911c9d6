"""What the settings of a head must hold: what each kind leaves open, and the loss that it wants.

Part of :mod:`mtp_train.rules`; imports nothing heavy either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_train.config import BUILT_IN_INITS, Config, get_field
from mtp_train.errors import ConfigError

_EAGLE: Mapping[str, Any] = MappingProxyType(
    {
        "head.num_layers": 1,
        "head.concat": "embedding_hidden",
        "head.recycle": "pre_norm",
        "head.first_embedding_mask": False,
        "head.norms.enorm": False,
        "head.norms.hnorm": False,
        "head.norms.input": False,
        "head.norms.post_attention": True,
        "head.norms.final": False,
    }
)


_EAGLE3: Mapping[str, Any] = MappingProxyType(
    {
        "head.num_layers": 1,
        "head.concat": "embedding_hidden",
        "head.first_embedding_mask": False,
        "head.projection_bias": False,
        "head.norms.enorm": True,
        "head.norms.hnorm": True,
        "head.norms.input": False,
        "head.norms.post_attention": True,
        "head.norms.final": True,
    }
)
_MEDUSA: Mapping[str, Any] = MappingProxyType(
    {
        "head.num_layers": 0,
        "head.concat": "embedding_hidden",
        "head.recycle": "pre_norm",
        "head.first_embedding_mask": False,
        "head.norms.enorm": False,
        "head.norms.hnorm": False,
        "head.norms.input": False,
        "head.norms.post_attention": False,
        "head.norms.final": False,
    }
)
_PUBLISHED: Mapping[str, tuple[Mapping[str, Any], str]] = MappingProxyType(
    {
        "eagle": (_EAGLE, "EAGLE-1 as published"),
        "eagle3": (_EAGLE3, "EAGLE-3 as published"),
        "medusa": (_MEDUSA, "Medusa-1 as published"),
    }
)

# What one kind alone has: (kind, its name), and the values of all the others.
_ONLY: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (
        "eagle3",
        "the head of EAGLE-3",
        MappingProxyType(
            {
                "head.layer_ids": (),
                "head.fusion_norm": "none",
                "head.norm_before_residual": False,
                "head.draft_vocab_size": 0,
            }
        ),
    ),
    ("medusa", "the head of Medusa", MappingProxyType({"head.num_blocks": 0})),
)


def check_head(config: Config) -> None:
    """Where the head starts from, and what its kind leaves open."""
    init = config.head.init
    if init not in BUILT_IN_INITS and not Path(init).is_dir():
        raise ConfigError(
            f"head.init={init!r}: must be {', '.join(BUILT_IN_INITS)} or a head directory "
            "(runs/<name>/head)"
        )
    kind = config.head.kind
    if kind in _PUBLISHED:
        _check_published(config, *_PUBLISHED[kind])
    for owner, name, fields in _ONLY:
        for path, value in fields.items():
            given = get_field(config, path)
            if kind != owner and given != value:
                raise ConfigError(
                    f"{path}={_shown(given)} with head.kind={kind}: only {name} has that; choose "
                    f"head={owner}"
                )
    if kind != "medusa" and not config.head.num_layers:
        raise ConfigError(
            f"head.num_layers=0 with head.kind={kind}: it has one decoder layer or, with "
            "head.kind=mtp, two"
        )
    if (init == "zero") != (kind == "medusa") and init in ("zero", "target_norm", "last_layer"):
        allowed = "zero or random" if kind == "medusa" else "random, target_norm or last_layer"
        raise ConfigError(
            f"head.init={init} with head.kind={kind}: use {allowed}, or a head directory; blocks "
            "of Medusa are no decoder layers, and no others start as the identity"
        )


def _check_published(config: Config, fields: Mapping[str, Any], meaning: str) -> None:
    kind = config.head.kind
    for path, value in fields.items():
        given = get_field(config, path)
        if given != value:
            raise ConfigError(
                f"{path}={_shown(given)} with head.kind={kind}: {meaning} has {_shown(value)}; "
                f"choose all of it with head={kind}, or set norms one by one with head.kind=mtp"
            )


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value).lower() if isinstance(value, bool) else value


def check_own_head(config: Config) -> None:
    """A head with an ``lm_head`` of its own learns a distribution, over its own vocabulary."""
    if config.head.kind != "eagle3":
        return
    loss = config.loss
    if loss.hidden_weight or not loss.logit_weight:
        raise ConfigError(
            f"loss.hidden_weight={loss.hidden_weight}, loss.logit_weight={loss.logit_weight} with "
            "head.kind=eagle3: its states are its own, only distributions are compared; choose "
            "loss=eagle3, or set loss.hidden_weight=0 and a loss.logit_weight above it"
        )
    if loss.kind != "soft_ce":
        raise ConfigError(
            f"loss.kind={loss.kind} with head.kind=eagle3: a head with an lm_head of its own is "
            "trained with soft_ce; choose loss=eagle3"
        )
    if loss.own_tokens:
        raise ConfigError(
            "loss.own_tokens=true with head.kind=eagle3: the unroll of a head with an lm_head of "
            "its own is fed the text's tokens; set it to false"
        )
    for name, instead in (
        ("sub_vocab_size", "use head.draft_vocab_size, which it drafts from as well"),
        ("vocab_chunk", "lower loss.row_chunk for less memory"),
    ):
        value = getattr(loss, name)
        if value:
            raise ConfigError(
                f"loss.{name}={value} with head.kind=eagle3: its loss is over its whole draft "
                f"vocabulary; set it to 0 and {instead}"
            )


def check_blocks(config: Config) -> None:
    """A Medusa head has one block per drafted token, each of which is one step of the loss."""
    if config.head.kind != "medusa":
        return
    count, loss = config.head.num_blocks, config.loss
    if not count:
        raise ConfigError("head.num_blocks=0 with head.kind=medusa: must be at least 1")
    if loss.num_unroll_steps != count:
        raise ConfigError(
            f"loss.num_unroll_steps={loss.num_unroll_steps} with head.num_blocks={count}: every "
            "block of a Medusa head is one step of its loss; give both the same value, as "
            "loss=medusa and head=medusa do"
        )
    if loss.own_tokens:
        raise ConfigError(
            "loss.own_tokens=true with head.kind=medusa: it embeds no tokens; set it to false"
        )
    for path in ("validate.k", "generate.k"):
        k = get_field(config, path)
        if k > count:
            raise ConfigError(
                f"{path}={k} with head.num_blocks={count}: one block per drafted token; lower "
                f"{path} or raise head.num_blocks and loss.num_unroll_steps"
            )

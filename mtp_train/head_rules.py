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
    (
        "medusa",
        "the head of Medusa",
        MappingProxyType({"head.num_blocks": 0, "head.own_lm_heads": False}),
    ),
)


def check_head(config: Config) -> None:
    """Where the head starts from, and what its kind leaves open."""
    init = config.head.init
    if init not in BUILT_IN_INITS and not Path(init).is_dir():
        raise ConfigError(
            f"head.init={init!r}: must be {', '.join(BUILT_IN_INITS)}, a head directory "
            "(runs/<name>/head), or the checkpoint that the target was tuned from"
        )
    if init == "native":
        _check_native(config)
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


def _check_native(config: Config) -> None:
    head = config.head
    wanted = {"kind": "mtp", "decoder": "target", "num_layers": 1}
    for name, value in wanted.items():
        given = getattr(head, name)
        if given != value:
            raise ConfigError(
                f"head.init=native with head.{name}={given}: the MTP weights of a target are one "
                f"decoder layer of its kind; set head.{name}={value}"
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
    """A head with ``lm_head``s of its own learns a distribution, over its own vocabulary."""
    head, loss = config.head, config.loss
    if head.kind != "eagle3" and not head.own_lm_heads:
        return
    has = "head.own_lm_heads=true" if head.own_lm_heads else f"head.kind={head.kind}"
    if loss.hidden_weight or not loss.logit_weight:
        raise ConfigError(
            f"loss.hidden_weight={loss.hidden_weight}, loss.logit_weight={loss.logit_weight} with "
            f"{has}: its states are its own, only distributions are compared; choose "
            f"loss={head.kind}, or set loss.hidden_weight=0 and a loss.logit_weight above it"
        )
    if loss.kind in ("forward_kl", "lk_lambda") and head.draft_vocab_size:
        raise ConfigError(
            f"loss.kind={loss.kind} with head.draft_vocab_size={head.draft_vocab_size}: the "
            "divergence from a head that cannot draft some tokens is infinite; use soft_ce, "
            "reverse_kl, tv, lk_alpha or expected_length, or set head.draft_vocab_size=0"
        )
    if loss.own_tokens:
        raise ConfigError(
            f"loss.own_tokens=true with {has}: the unroll of a head with an lm_head of its own is "
            "fed the text's tokens; set it to false"
        )
    instead_of_list = "set it to 0: the loss is over all tokens that it drafts"
    if head.kind == "eagle3":
        instead_of_list = "set it to 0 and use head.draft_vocab_size, which it drafts from as well"
    for name, instead in (
        ("sub_vocab_size", instead_of_list),
        ("vocab_chunk", "set it to 0 and lower loss.row_chunk for less memory"),
    ):
        value = getattr(loss, name)
        if value:
            raise ConfigError(
                f"loss.{name}={value} with {has}: its loss is over its whole draft vocabulary; "
                f"{instead}"
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

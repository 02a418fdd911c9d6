"""The shape and the first weights of a head, both taken from the target.

``random``: truncated normal with the target's own ``initializer_range``, norms at one, a bias at
zero.
``target_norm``: the same, but with the target's final norm as the head's.
``last_layer``: the target's last decoder layer (its last two), its final norm as the head's final
norm, and an ``eh_proj`` that passes the hidden state through unchanged. Of EAGLE-3: an ``fc`` that
passes the last residual stream through, attention that does not see the embedding yet, and
``hidden_norm`` as the layer's first norm.
``zero``: every block of Medusa starts as the identity, and drafts what ``lm_head`` reads in ``g``.
A directory: the weights of a head of the same shape, which training goes on from.

Every ``lm_head`` of the head's own starts from the target's rows in all but the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mtp_train.config import HeadConfig
from mtp_train.layer_ids import source_fields
from runtime.head_spec import (
    DRAFT_VOCAB_NAME,
    DraftVocab,
    HeadSpec,
    NormPlacement,
    layer_prefix,
    load_head,
)
from runtime.layer_parts import (
    CORRECTION_BIAS,
    PLAIN_LAYER,
    ExpertSpec,
    LatentSpec,
    LayerParts,
)
from runtime.models.config import ModelConfig

logger = logging.getLogger(__name__)

TensorReader = Callable[[str], torch.Tensor]

# What engines read from an EAGLE head's own files: training on keeps it.
_OF_AN_EAGLE_HEAD = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope",
    "norm_eps",
    "target_hidden_size",
    "embedding",
)


@dataclass(frozen=True)
class OwnHead:
    """What an ``lm_head`` of the head's own starts from: the target's rows ``[W, D]`` of ``ids_W``
    (int64, ascending; ``None``: all of them).
    """

    ids_W: torch.Tensor | None
    rows_WD: torch.Tensor


def make_head_spec(
    config: HeadConfig,
    target: ModelConfig,
    *,
    fingerprint: str,
    draft_vocab: DraftVocab | None = None,
    like: HeadSpec | None = None,
) -> HeadSpec:
    """The spec of a head for ``target``; everything but the user's choices is the target's.

    ``draft_vocab``: the list that a head with an ``lm_head`` of its own is trained over. ``like``:
    the head that training goes on from; an EAGLE head keeps its sizes, RoPE and embedding, which
    need not be the target's. Raises ``ValueError`` where ``head.init=last_layer`` finds layers of
    another kind than the head's, or ``like`` reads states of another width.
    """
    parts = head_parts(config, target.layer_parts)
    follows = follows_target(config)
    latent, experts = (target.latent, _experts_of_head(target)) if follows else (None, None)
    if config.init == "last_layer":
        _check_last_layers(config, target, latent, experts)
    if config.init == "last_layer" and parts != target.layer_parts:
        logger.warning(
            "head.init=last_layer: the target's decoder layers have %s, the head's %s; what is "
            "missing is left out of the copy",
            target.layer_parts,
            parts,
        )
    spec = HeadSpec(
        kind=config.kind,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        rope=target.rope,
        norm_eps=target.norm_eps,
        target_fingerprint=fingerprint,
        num_layers=config.num_layers,
        num_blocks=config.num_blocks,
        concat=config.concat,
        recycle=config.recycle,
        first_embedding_mask=config.first_embedding_mask,
        projection_bias=config.projection_bias,
        layer_parts=parts,
        latent=latent,
        experts=experts,
        norm_form=target.norm_form,
        norms=NormPlacement(**asdict(config.norms)),
        logits_from="pre_norm" if config.kind in ("eagle", "medusa") else "post_norm",
        **source_fields(config, num_layers=target.num_layers),
        draft_vocab=draft_vocab,
    )
    if like is None or like.kind != spec.kind or spec.kind not in ("eagle", "eagle3"):
        return spec
    if like.target_width != target.hidden_size:
        raise ValueError(
            f"head.init={config.init}: the head there reads states {like.target_width} wide, the "
            f"target's are {target.hidden_size}"
        )
    return replace(spec, **{field: getattr(like, field) for field in _OF_AN_EAGLE_HEAD})


def _experts_of_head(target: ModelConfig) -> ExpertSpec | None:
    """Those of the target's last layer, which a head stands behind."""
    if target.experts is None or not target.has_experts(target.num_layers - 1):
        return None
    return replace(target.experts, dense_layers=())


def _check_last_layers(
    config: HeadConfig,
    target: ModelConfig,
    latent: LatentSpec | None,
    experts: ExpertSpec | None,
) -> None:
    """Raise ``ValueError`` unless the layers to be copied have the head's attention and MLP."""
    for layer in range(target.num_layers - config.num_layers, target.num_layers):
        own_experts = target.has_experts(layer)
        if latent == target.latent and own_experts == (experts is not None):
            continue
        has = _describe_kind(target.latent is not None, own_experts)
        ours = _describe_kind(latent is not None, experts is not None)
        raise ValueError(
            f"head.init=last_layer: layer {layer} of {target.architecture} has {has} and cannot be "
            f"copied into a head with {ours}; use head.init=target_norm or random, or a head of "
            "the target's kind (head.kind=mtp, head.decoder=target, head.num_layers=1)"
        )


def _describe_kind(is_latent: bool, has_experts: bool) -> str:
    attention = "latent" if is_latent else "grouped-query"
    return f"{attention} attention and {'experts' if has_experts else 'a dense MLP'}"


def unknown_draft_vocab(size: int) -> DraftVocab | None:
    """A list of ``size`` ids where only their number matters; ``None`` for 0."""
    return DraftVocab(size, coverage=0.0, ids_sha256="") if size else None


def head_parts(config: HeadConfig, target: LayerParts) -> LayerParts:
    """Biases and head norms of the head's decoder layers: the target's, unless
    ``head.decoder=llama``. EAGLE's formats have none.
    """
    return target if follows_target(config) else PLAIN_LAYER


def follows_target(config: HeadConfig) -> bool:
    """Whether the head's layers are of the target's kind."""
    return config.kind == "mtp" and config.decoder == "target"


def initialise(
    spec: HeadSpec,
    *,
    method: str,
    seed: int,
    initializer_range: float,
    num_target_layers: int,
    read_target: TensorReader,
    own_head: OwnHead | None = None,
) -> dict[str, torch.Tensor]:
    """fp32 tensors of a fresh head, under the names and shapes of ``spec.tensor_shapes()``.

    ``method``: ``random``, ``target_norm``, ``last_layer`` or ``zero``. ``read_target`` returns a
    tensor of the target's checkpoint by its Hugging Face name, for the middle two. ``own_head``
    is required where the head has an ``lm_head`` of its own. The values depend on these, ``seed``
    and the tensors' names alone.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    if spec.lm_head == "own":
        assert own_head is not None, "an lm_head of its own starts from the target's rows"
        for name in spec.own_lm_heads:
            tensors[name] = own_head.rows_WD.float().cpu().clone()
        if own_head.ids_W is not None:
            tensors[DRAFT_VOCAB_NAME] = own_head.ids_W
    for name, shape in sorted(spec.tensor_shapes().items()):
        if name in tensors:
            continue
        if len(shape) == 1:
            is_zero = spec.norm_form == "1+w" or name.endswith((".bias", CORRECTION_BIAS))
            tensors[name] = torch.full(shape, 0.0 if is_zero else 1.0)
            continue
        std = 0.0 if method == "zero" else initializer_range
        values = torch.zeros(shape)
        if std:
            torch.nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
        tensors[name] = values
    if method == "last_layer":
        _copy_last_layer(spec, tensors, num_target_layers, read_target)
    if method in ("target_norm", "last_layer") and spec.norms.final:
        tensors["norm.weight"] = read_target("model.norm.weight").float().clone()
    return tensors


def read_draft_list(path: Path, *, size: int) -> torch.Tensor | None:
    """The ids (int64, ascending) that the native head in ``path`` drafts from, which training goes
    on with; ``None``: all. Raises ``ValueError`` unless they are ``head.draft_vocab_size=size``.
    """
    found, tensors = load_head(path)
    own = found.draft_vocab.size if found.draft_vocab else 0
    if own != size:
        raise ValueError(
            f"head.draft_vocab_size={size}: the head in head.init={path} drafts from "
            f"{own or 'all'} tokens; set head.draft_vocab_size={own}, and its list is kept"
        )
    return tensors.get(DRAFT_VOCAB_NAME)


def read_initial_head(path: Path, spec: HeadSpec) -> dict[str, torch.Tensor]:
    """fp32 tensors of the native head in ``path``. Raises ``ValueError`` naming what differs from
    ``spec``, but for the longest position and what its list covers; a head of another target is
    taken with a warning.
    """
    found, tensors = load_head(path)
    if found.target_fingerprint != spec.target_fingerprint:
        logger.warning(
            "head.init=%s: trained for another target (fingerprint %s…); its acceptance says "
            "nothing of this one",
            path,
            found.target_fingerprint[:12],
        )
    found = replace(
        found,
        target_fingerprint=spec.target_fingerprint,
        max_position_embeddings=spec.max_position_embeddings,
    )
    if found.draft_vocab is not None and spec.draft_vocab is not None:
        covering = replace(found.draft_vocab, coverage=spec.draft_vocab.coverage)
        found = replace(found, draft_vocab=covering)
    there, wanted = asdict(found), asdict(spec)
    differing = [
        f"{key}={there[key]!r}, not {wanted[key]!r}" for key in wanted if there[key] != wanted[key]
    ]
    if differing:
        raise ValueError(
            f"head.init={path}: the head there has {'; '.join(differing)}; set head.* to what it is"
        )
    return {n: t if n == DRAFT_VOCAB_NAME else t.float() for n, t in tensors.items()}


def _copy_last_layer(
    spec: HeadSpec,
    tensors: dict[str, torch.Tensor],
    num_target_layers: int,
    read_target: TensorReader,
) -> None:
    width = spec.hidden_size
    for index in range(spec.num_layers):
        own = layer_prefix(index)
        source = "model." + layer_prefix(num_target_layers - spec.num_layers + index)
        for name in tensors:
            if not name.startswith(own) or name == own + "hidden_norm.weight":
                continue
            values = read_target(source + name.removeprefix(own)).float().clone()
            if values.shape != tensors[name].shape:  # q, k, v of EAGLE-3 read the embedding too
                values = torch.cat((torch.zeros_like(values), values), dim=1)
            tensors[name] = values
    identity, zero = torch.eye(width), torch.zeros(width, width)
    if spec.kind == "eagle3":
        norm = tensors["layers.0.input_layernorm.weight"]
        tensors["layers.0.hidden_norm.weight"] = norm.clone()
        tensors["fc.weight"] = torch.cat([zero] * (len(spec.layer_ids) - 1) + [identity], dim=1)
        return
    halves = (zero, identity) if spec.concat == "embedding_hidden" else (identity, zero)
    tensors["eh_proj.weight"] = torch.cat(halves, dim=1)

"""The MTP module of a target's own checkpoint as a head: the first, if there are several.

Weights are those of the checkpoint, quantised ones made plain as the target's are. The module's
own copies of embedding and ``lm_head`` are left out: the runtime, as vLLM and SGLang do, takes the
target's. Where they differ, that is said.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mtp_train.config import Config, HeadConfig
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.heads.init import make_head_spec
from mtp_train.native.drift import Drift, measure_drift, relative_difference
from mtp_train.native.names import SHARED_COPIES, layout_of, stored_name
from mtp_train.native.splice import list_tensors
from mtp_train.run_dir import NATIVE_HEAD, RunDirectory
from runtime.head_spec import CONFIG_NAME, HeadSpec, load_head, save_head
from runtime.models.checkpoint import Checkpoint, weight_files
from runtime.models.config import ModelConfig, load_config
from runtime.models.loader import fingerprint_target

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
# Of a base and its fine-tune: how long a context is allowed to be does not matter to the weights.
_MAY_DIFFER = ("target_fingerprint", "max_position_embeddings")


@dataclass(frozen=True)
class NativeHead:
    """``tensors`` under native names, in the dtype that they are stored in; bfloat16 where they are
    quantised.
    """

    spec: HeadSpec
    tensors: dict[str, torch.Tensor]


def native_spec(target: ModelConfig, *, fingerprint: str, source: str) -> HeadSpec:
    """The contract of the target's own MTP module. Raises ``ValueError`` where it has none."""
    if not target.num_native_heads:
        raise ValueError(
            f"{source}: {target.architecture} without num_nextn_predict_layers in its config.json "
            "has no MTP weights of its own; train a head (head.init=last_layer), or take those of "
            "the model that it was tuned from: head.init=<its directory>"
        )
    is_mimo = layout_of(target) == "mimo"
    head = HeadConfig(concat="hidden_embedding" if is_mimo else "embedding_hidden")
    spec = make_head_spec(head, target, fingerprint=fingerprint)
    experts = None
    if target.experts is not None and target.has_experts(target.num_layers):
        experts = replace(target.experts, dense_layers=())
    return replace(spec, experts=experts)


def read_native_head(directory: Path, *, fingerprint: str) -> NativeHead:
    """The first MTP module of the checkpoint in ``directory`` (Hugging Face), strictly.

    Raises ``ValueError`` naming the tensor that is missing or of another shape.
    """
    target = load_config(directory)
    spec = native_spec(target, fingerprint=fingerprint, source=f"target={directory}")
    if target.num_native_heads > 1:
        logger.info("%d MTP modules: the first is read", target.num_native_heads)
    layout, prefix = layout_of(target), target.native_prefixes[0]
    names = {n: stored_name(n, layout=layout, prefix=prefix) for n in spec.tensor_shapes()}
    try:
        checkpoint = Checkpoint(
            directory,
            {names[name]: shape for name, shape in spec.tensor_shapes().items()},
            tied=False,
            unread=("",),
            quantisation=target.quantisation,
        )
    except ValueError as error:
        raise ValueError(
            f"{error}; a fine-tune that has lost its MTP weights can take those of the model that "
            "it was tuned from: head.init=<its directory>"
        ) from error
    _warn_of_own_copies(checkpoint, prefix, target)
    tensors = {}
    for name, stored in names.items():
        is_quantised = checkpoint.is_quantised(stored)
        dtype = torch.bfloat16 if is_quantised else checkpoint.stored_dtype(stored)
        tensors[name] = checkpoint.read(stored, dtype=dtype, device=_CPU)
    return NativeHead(spec, tensors)


def initial_native_head(directory: Path, spec: HeadSpec) -> dict[str, torch.Tensor]:
    """fp32 tensors of ``directory``'s MTP module for a head of ``spec`` to go on from.

    The order of the projection's inputs is that of ``spec``. Raises ``ValueError`` naming what else
    differs.
    """
    found = read_native_head(directory, fingerprint=spec.target_fingerprint)
    tensors = {name: tensor.float() for name, tensor in found.tensors.items()}
    if found.spec.concat != spec.concat:
        left, right = tensors["eh_proj.weight"].chunk(2, dim=1)
        tensors["eh_proj.weight"] = torch.cat((right, left), dim=1)
    there, wanted = asdict(replace(found.spec, concat=spec.concat)), asdict(spec)
    differing = [
        f"{key}={there[key]!r}, not {wanted[key]!r}"
        for key in wanted
        if there[key] != wanted[key] and key not in _MAY_DIFFER
    ]
    if differing:
        raise ValueError(
            f"MTP weights of {directory}: they are for {'; '.join(differing)}. Set head.* to what "
            "they are (head.decoder=target, all norms), or take weights of the target's kind"
        )
    return tensors


def initial_base_head(base: Path, spec: HeadSpec, *, target_dir: Path) -> dict[str, torch.Tensor]:
    """As :func:`initial_native_head`, from the checkpoint that the target was tuned from; warns of
    how far the target has moved away from it.
    """
    tensors = initial_native_head(base, spec)
    drift = measure_drift(base, target_dir)
    logger.warning("head.init=%s: %s", base, describe_drift(drift))
    return tensors


def describe_drift(drift: Drift) -> str:
    """One sentence for a log."""
    parts = ", ".join(f"{name} {value:.2e}" for name, value in drift.parts().items())
    return (
        "MTP weights of another checkpoint than the target's. What both have is this far apart "
        f"(norm of the difference over the target's): {parts}. The head was made for the states of "
        "that model: measure it (mtp validate) before it serves, and train on"
    )


def is_checkpoint(directory: Path) -> bool:
    """Whether it is a model's directory, not a head's: an exported head has ``architectures`` in
    its ``config.json`` too, but no final norm of a model.
    """
    file = directory / CONFIG_NAME
    if not file.is_file() or '"architectures"' not in file.read_text():
        return False
    return any("model.norm.weight" in list_tensors(weights) for weights in weight_files(directory))


def keep_native_head(config: Config) -> Path | None:
    """Write the target's own MTP module as a head directory of the run, where ``validate.head``
    asks for it; it is left alone while it is of this target. For one rank.
    """
    if config.validate.head != NATIVE_HEAD:
        return None
    place = RunDirectory.from_config(config).head
    directory = target_directory(config.target)
    fingerprint = fingerprint_target(directory, cache_dir=cache_directory(config.target))
    if (place / CONFIG_NAME).is_file() and load_head(place)[0].target_fingerprint == fingerprint:
        return place
    head = read_native_head(directory, fingerprint=fingerprint)
    save_head(place, head.spec, head.tensors)
    logger.info("the target's own MTP weights are in %s", place)
    return place


def _warn_of_own_copies(checkpoint: Checkpoint, prefix: str, target: ModelConfig) -> None:
    for name, source in SHARED_COPIES.items():
        if not checkpoint.holds(prefix + name):
            continue
        is_tied = source == "lm_head.weight" and target.tie_word_embeddings
        theirs = checkpoint.read_stored("model.embed_tokens.weight" if is_tied else source)
        difference = relative_difference(checkpoint.read_stored(prefix + name), theirs)
        if difference:
            logger.warning(
                "%s%s differs from the target's %s (%.2e, relative): the target's is used, as "
                "serving engines do",
                prefix,
                name,
                source,
                difference,
            )

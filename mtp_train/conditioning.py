"""A target reparametrised without changing what it computes: conditioned like a larger model.

With a diagonal ``D`` of powers of two, the final norm's weight becomes ``D w`` and the columns of
``lm_head`` are divided by ``D``. Hidden states are then ``D g``, and every product that makes a
logit is the product it was, bit for bit, in every float dtype: scaling by a power of two is exact.
The embedding stays, so a tied head is untied. The same holds for a feature store of ``g``:
multiplied by ``D`` it is the store that a dump of the new target gives.

    python -m mtp_train.conditioning --target smollm2-135m-instruct --scale 8 \\
        --outliers 6 --outlier-scale 64 --out runs/targets/outliers \\
        --features runs/mine/features/train:runs/outliers/features/train

Shape legend: D model width, V vocabulary, T tokens of one sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from mtp_train.features.manifest import POST_FINAL_NORM, Fingerprint
from mtp_train.features.reader import FeatureReader
from mtp_train.features.writer import FeatureWriter, finish_store, lock_store, recover_store
from mtp_train.normalisers import copy_normalisers
from runtime.files import write_atomic
from runtime.models.checkpoint import Checkpoint, weight_files
from runtime.models.config import load_config
from runtime.models.loader import default_cache_dir, fingerprint_target, resolve_target
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

RECORD_NAME = "conditioning.json"
_FINAL_NORM = "model.norm.weight"
_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """``D``: ``scale`` everywhere, times ``outlier_scale`` in ``num_outliers`` channels.

    Raises ``ValueError`` for a factor that is not a power of two.
    """

    scale: float
    num_outliers: int = 0
    outlier_scale: float = 1.0
    seed: int = 0  # which channels

    def __post_init__(self) -> None:
        for name in ("scale", "outlier_scale"):
            value = getattr(self, name)
            if not (value > 0 and math.frexp(value)[0] == 0.5):
                raise ValueError(
                    f"{name}={value}: must be a power of two such as 8 or 0.25, so that no "
                    "rounding changes the target"
                )
        if self.num_outliers < 0:
            raise ValueError(f"num_outliers={self.num_outliers}: must not be negative")

    def channels(self, width: int) -> torch.Tensor:
        """The outlier channels, int64 ascending, drawn by the seed."""
        if self.num_outliers > width:
            raise ValueError(f"num_outliers={self.num_outliers}: the model has {width} channels")
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "outliers"))
        return torch.randperm(width, generator=generator)[: self.num_outliers].sort().values

    def diagonal(self, width: int) -> torch.Tensor:
        """fp32 ``[D]``."""
        diagonal_D = torch.full((width,), self.scale)
        diagonal_D[self.channels(width)] *= self.outlier_scale
        return diagonal_D


@dataclasses.dataclass(frozen=True)
class ConditionedTarget:
    """What was written by :func:`condition_target`, as its directory records it."""

    path: Path
    conditioning: Conditioning
    source_fingerprint: str  # of the target it was made from


def condition_target(
    source: Path, out: Path, conditioning: Conditioning, *, cache_dir: Path
) -> ConditionedTarget:
    """Write the Hugging Face directory of the reparametrised target; tokenizer and all else are
    copied. ``out`` must not exist; it appears whole.

    Raises ``ValueError`` when a weight does not survive (a dtype whose range is left).
    """
    if out.exists():
        raise ValueError(f"out={out}: exists; name a directory that does not")
    config = load_config(source)
    if config.quantisation is not None:
        raise ValueError(
            f"{source}: is quantised ({config.quantisation.label}); reparametrise an unquantised "
            "checkpoint"
        )
    checkpoint = Checkpoint.of(source, config)
    diagonal_D = conditioning.diagonal(config.hidden_size)
    tensors = {name: checkpoint.read_stored(name) for name in config.tensor_shapes()}
    lm_head_VD = tensors[_EMBEDDING if config.tie_word_embeddings else _LM_HEAD]
    tensors[_LM_HEAD] = _scaled(_LM_HEAD, lm_head_VD, 1.0 / diagonal_D)
    tensors[_FINAL_NORM] = _scaled(_FINAL_NORM, tensors[_FINAL_NORM], diagonal_D)
    staged = out.with_name(f".{out.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    stored = {file.name for file in weight_files(source)}
    skipped = {*stored, "model.safetensors.index.json", "config.json"}
    shutil.copytree(source, staged, ignore=lambda _, names: [n for n in names if n in skipped])
    raw = json.loads((source / "config.json").read_text())
    raw["tie_word_embeddings"] = False
    write_atomic(staged / "config.json", json.dumps(raw, indent=2))
    save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
    made = ConditionedTarget(out, conditioning, fingerprint_target(source, cache_dir=cache_dir))
    record = {
        "source": made.source_fingerprint,
        "conditioning": dataclasses.asdict(conditioning),
        "channels": conditioning.channels(config.hidden_size).tolist(),
    }
    write_atomic(staged / RECORD_NAME, json.dumps(record, indent=2))
    staged.rename(out)
    return made


def open_conditioned(path: Path) -> ConditionedTarget:
    """The record of a directory that :func:`condition_target` wrote. ``ValueError`` without one."""
    file = path / RECORD_NAME
    if not file.is_file():
        raise ValueError(
            f"target={path}: {RECORD_NAME} is missing; it was not written by this tool"
        )
    record = json.loads(file.read_text())
    return ConditionedTarget(path, Conditioning(**record["conditioning"]), record["source"])


def condition_features(
    store: Path, out: Path, target: ConditionedTarget, *, cache_dir: Path
) -> None:
    """Write the store that a dump of ``target`` would give, from the store of the target it was
    made from. What a run over ``store`` has kept of normalisers holds for it too.

    The new store's fingerprint names the new weights and the store it was made from. Raises
    ``ValueError`` for another target's store, for states that are not ``g`` and for a codec that
    rounds (channels of one row share its scale).
    """
    reader = FeatureReader(store)
    base = reader.manifest.fingerprint
    if base.target_weights != target.source_fingerprint:
        raise ValueError(
            f"features={store}: made with target {base.target_weights[:12]}, but {target.path} was "
            f"made from {target.source_fingerprint[:12]}"
        )
    if base.hidden_state != POST_FINAL_NORM or base.layer_ids:
        raise ValueError(f"features={store}: holds {base.hidden_state}; only g can be scaled")
    if base.codec == "fp8_e4m3":
        raise ValueError(
            f"features={store}: codec fp8_e4m3 has one scale per row and rounds what it holds; "
            "dump with features=bf16 or features=fp32"
        )
    diagonal_D = target.conditioning.diagonal(base.hidden_size)
    fingerprint = conditioned_fingerprint(
        base, target_weights=fingerprint_target(target.path, cache_dir=cache_dir)
    )
    with lock_store(out):
        manifest = recover_store(out, fingerprint)
        with FeatureWriter(
            out,
            fingerprint=fingerprint,
            shard_tokens=max(shard.num_tokens for shard in reader.manifest.shards),
            max_quarantined=0,
            known=manifest.settled_ids(),
        ) as writer:
            for index in range(len(reader)):
                sample = reader.get(index)
                writer.add(
                    sample.sample_id,
                    sample.input_ids,
                    sample.loss_mask,
                    sample.hidden * diagonal_D,
                )
        finish_store(out)
    copied = copy_normalisers(store, out, features=base.digest(), new_features=fingerprint.digest())
    logger.info("%s: %d samples, %d files of normalisers", out, len(reader), copied)


def conditioned_fingerprint(base: Fingerprint, *, target_weights: str) -> Fingerprint:
    """Of a store made by :func:`condition_features`; a dump's own never equals it."""
    return dataclasses.replace(
        base,
        target_weights=target_weights,
        settings=(*base.settings, ("scaled_from", base.digest())),
    )


def _scaled(name: str, weight: torch.Tensor, factor_D: torch.Tensor) -> torch.Tensor:
    """``weight * factor`` along the last dimension, in the weight's dtype, exactly."""
    scaled = (weight.float() * factor_D).to(weight.dtype)
    if not torch.equal(scaled.float() / factor_D, weight.float()):
        raise ValueError(f"tensor {name}: scaling leaves the range of {weight.dtype}")
    return scaled


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a target and any number of stores (``SOURCE:OUT``). What is there stays."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m mtp_train.conditioning")
    parser.add_argument("--target", required=True, help="directory, .gguf file or built-in name")
    parser.add_argument("--out", required=True, type=Path, help="directory of the new target")
    parser.add_argument("--scale", required=True, type=float, help="a power of two")
    parser.add_argument("--outliers", type=int, default=0, help="number of outlier channels")
    parser.add_argument("--outlier-scale", type=float, default=1.0, help="a power of two")
    parser.add_argument("--seed", type=int, default=0, help="which channels")
    parser.add_argument("--features", nargs="*", default=[], metavar="SOURCE:OUT")
    given = parser.parse_args(arguments)
    cache_dir = default_cache_dir()
    try:
        wanted = Conditioning(given.scale, given.outliers, given.outlier_scale, given.seed)
        if given.out.exists():
            target = open_conditioned(given.out)
            if target.conditioning != wanted:
                raise ValueError(f"out={given.out}: exists, with {target.conditioning}")
        else:
            source = resolve_target(given.target, cache_dir=cache_dir)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            target = condition_target(source, given.out, wanted, cache_dir=cache_dir)
        for pair in given.features:
            store, _, out = pair.partition(":")
            condition_features(Path(store), Path(out), target, cache_dir=cache_dir)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

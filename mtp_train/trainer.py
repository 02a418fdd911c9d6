"""The training stage: from a configuration to a trained head in the run directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtp_train.checkpoint import Observer
from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup, run_on_leader
from mtp_train.features.reader import FeatureReader
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.heads.init import initialise, make_head_spec
from mtp_train.metrics import Best, TrainReport, Validator
from mtp_train.run_dir import RunDirectory, StageRecord
from mtp_train.train_loop import SampleSource, Trainer, TrainInputs, ignore
from mtp_train.validate.in_subprocess import SubprocessValidator
from mtp_train.validate.in_training import build_validator, lm_head_weight
from runtime.cpu import best_dtype, count_physical_cores, set_threads
from runtime.models.config import load_config
from runtime.models.loader import (
    Checkpoint,
    fingerprint_target,
    load_target,
)
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

DEFAULT_INITIALIZER_RANGE = 0.02  # transformers' default where config.json has none


def run(config: Config, *, group: ProcessGroup, observe: Observer = ignore) -> TrainReport:
    """Train, or say that it is done. A collective; every rank gets the same report.

    Reads the features and the target that ``config`` names, validates through the runtime where
    ``trainer.validate_every`` asks for it, and leaves ``head/``, ``checkpoints/`` and events.
    Raises ``ValueError`` for input that does not fit and ``TrainingDivergedError`` after too many
    steps without finite gradients.
    """
    if group.device.type == "cpu":
        share = max(1, count_physical_cores() // group.local_world_size)
        set_threads(config.runtime.num_threads or share)
    inputs, validator = open_inputs(config, group=group)
    trainer = Trainer(config, inputs, group=group, validator=validator, observe=observe)
    settings = {k: v for k, v in trainer.settings().items() if k != "world_size"}
    place = RunDirectory.from_config(config).checkpoints / "train.json"
    record = StageRecord(place, stage="train", fingerprint=settings)
    if group.broadcast_object(record.state()) == "finished":
        logger.info("training is finished: %s", trainer.head_dir)
        return _report(group.broadcast_object(record.outputs()))
    if group.is_leader:
        record.start()
    report = trainer.train()
    if group.is_leader:
        record.finish(_outputs(report))
    group.barrier()
    return report


def open_inputs(config: Config, *, group: ProcessGroup) -> tuple[TrainInputs, Validator | None]:
    """Features, target tensors, first weights, and the validator if one is asked for.

    With an inline validator the embedding and ``lm_head`` are the runtime target's own storage.
    """
    run_directory = RunDirectory.from_config(config)
    cache = cache_directory(config.target)
    dtype = _dtype(config, group.device)
    directory = run_on_leader(group, lambda: target_directory(config.target))
    target_config = load_config(directory)
    fingerprint = fingerprint_target(directory, cache_dir=cache)
    samples = FeatureReader(run_directory.features / "train")
    stored = samples.manifest.fingerprint.target_weights
    if stored != fingerprint:
        raise ValueError(
            f"features={samples.path}: made with a target whose fingerprint is {stored}, but "
            f"target.path={config.target.path} has {fingerprint}; run `mtp precompute` again"
        )
    if not len(samples):
        raise ValueError(f"features={samples.path}: the store is empty; run `mtp precompute`")
    checkpoint = Checkpoint(
        directory, target_config.tensor_shapes(), tied=target_config.tie_word_embeddings
    )

    def read_target(name: str) -> torch.Tensor:
        return checkpoint.read(name, dtype=torch.float32, device=torch.device("cpu"))

    validator: Validator | None = None
    is_inline = config.validate.placement == "inline"
    if config.trainer.validate_every and not is_inline:
        validator = SubprocessValidator(config, group=group)
    if config.trainer.validate_every and is_inline:
        target = load_target(config.target.path, dtype=dtype, device=group.device, cache_dir=cache)
        validator = build_validator(config, target=target, group=group)
        embedding, lm_head = target.model.embedding_VD, lm_head_weight(target.model)
    else:
        embedding = checkpoint.read("model.embed_tokens.weight", dtype=dtype, device=group.device)
        lm_head = embedding
        if not target_config.tie_word_embeddings:
            lm_head = checkpoint.read("lm_head.weight", dtype=dtype, device=group.device)
    spec = make_head_spec(config.head, target_config, fingerprint=fingerprint)
    initial = initialise(
        spec,
        method=config.head.init,
        seed=derive_seed(config.seed, "head", config.head.init),
        initializer_range=_initializer_range(directory),
        num_target_layers=target_config.num_layers,
        read_target=read_target,
    )
    kept = None
    if config.loss.sub_vocab_size:
        kept = frequent_answer_ids(
            samples, size=config.loss.sub_vocab_size, vocab_size=target_config.vocab_size
        )
    inputs = TrainInputs(
        spec=spec,
        initial=initial,
        embedding_VD=embedding,
        lm_head_VD=lm_head,
        samples=samples,
        kept_ids=kept,
        fingerprint={
            "target": fingerprint,
            "features": samples.manifest.fingerprint.digest(),
            "head": {
                "kind": config.head.kind,
                "init": config.head.init,
                "concat": config.head.concat,
                "recycle": config.head.recycle,
                "first_embedding_mask": config.head.first_embedding_mask,
            },
        },
    )
    return inputs, validator


def frequent_answer_ids(samples: SampleSource, *, size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` ids that occur most often under the loss mask (int64, ascending).

    Ties go to the smaller id. Raises ``ValueError`` when ``size`` is not below ``vocab_size``.
    """
    if not 0 < size < vocab_size:
        raise ValueError(
            f"loss.sub_vocab_size={size}: must be below the target's vocabulary of {vocab_size} "
            "(0 uses all of it)"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(samples)):
        sample = samples.get(index, dtype=torch.bfloat16)
        counts += torch.bincount(sample.input_ids[sample.loss_mask], minlength=vocab_size)
    order = torch.sort(counts, descending=True, stable=True).indices[:size]
    covered = counts[order].sum().item() / max(1, counts.sum().item())
    logger.info("loss over the %d most frequent answer tokens: %.2f %%", size, 100 * covered)
    return order.sort().values


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.trainer.dtype == "auto":
        return best_dtype() if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if config.trainer.dtype == "bfloat16" else torch.float32


def _initializer_range(directory: Path) -> float:
    raw = json.loads((directory / "config.json").read_text())
    return float(raw.get("initializer_range", DEFAULT_INITIALIZER_RANGE))


def _outputs(report: TrainReport) -> dict[str, Any]:
    return {
        "steps": report.steps,
        "updates": report.updates,
        "skipped": report.skipped,
        "best": report.best,
        "tokens_per_s": report.tokens_per_s,
        "head_dir": report.head_dir,
    }


def _report(outputs: Mapping[str, Any]) -> TrainReport:
    best = outputs["best"]
    values = dict(outputs) | {"best": None if best is None else Best(**best), "final": None}
    return TrainReport(**values)

"""The training stage: from a configuration to a trained head in the run directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.token_set import TokenSet, load_token_set
from mtp_train.answer_tokens import count_answer_tokens, covered_share, most_frequent
from mtp_train.checkpoint import Observer
from mtp_train.config import BUILT_IN_INITS, Config
from mtp_train.distributed import ProcessGroup, run_on_leader
from mtp_train.draft_loss import DraftTarget
from mtp_train.features.reader import FeatureReader
from mtp_train.features.target import cache_directory, target_directory, target_dtype
from mtp_train.heads.init import (
    OwnHead,
    initialise,
    make_head_spec,
    read_draft_list,
    read_initial_head,
)
from mtp_train.layer_ids import choose_layer_ids
from mtp_train.metrics import Best, TrainReport, Validator
from mtp_train.native.reader import initial_base_head, initial_native_head, is_checkpoint
from mtp_train.normalisers import NormaliserKey, load_normalisers, save_normalisers
from mtp_train.resume_settings import head_settings
from mtp_train.run_dir import RunDirectory, StageRecord
from mtp_train.targets import open_target
from mtp_train.train_loop import Trainer, TrainInputs, ignore
from mtp_train.validate.in_subprocess import SubprocessValidator
from mtp_train.validate.in_training import build_validator, lm_head_weight
from runtime.cpu import best_dtype, limit_kernel_caches, set_threads
from runtime.files import sha256_file
from runtime.head_spec import WEIGHTS_NAME, DraftVocab, hash_vocab_ids, load_head_spec
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.models.loader import fingerprint_target
from runtime.processor import count_physical_cores
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

_SCAN_ROWS = 1024
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
        limit_kernel_caches()
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
    num_known = len(inputs.normalisers)
    report = trainer.train()
    if len(inputs.normalisers) > num_known:
        _keep_normalisers(config, inputs, group=group)
    if group.is_leader:
        record.finish(_outputs(report))
    group.barrier()
    return report


def open_inputs(config: Config, *, group: ProcessGroup) -> tuple[TrainInputs, Validator | None]:
    """Features, target tensors, first weights, and the validator if one is asked for.

    Only samples of the token set's train split are trained on, whatever else the store holds. An
    inline validator runs in the dtype that is served; where training has the same, the embedding
    and ``lm_head`` are the runtime target's own storage.
    """
    run_directory = RunDirectory.from_config(config)
    cache = cache_directory(config.target)
    dtype = training_dtype(config, group.device)
    directory = run_on_leader(group, lambda: target_directory(config.target))
    target_config = load_config(directory)
    fingerprint = fingerprint_target(directory, cache_dir=cache)
    token_set = load_token_set(run_directory.data)
    layer_ids = choose_layer_ids(config.head, num_layers=target_config.num_layers)
    samples = _open_samples(run_directory.features / "train", token_set, layer_ids)
    stored = samples.manifest.fingerprint.target_weights
    if stored != fingerprint:
        raise ValueError(
            f"features={samples.path}: made with a target whose fingerprint is {stored}, but "
            f"target.path={config.target.path} has {fingerprint}; run `mtp precompute` again"
        )
    if not len(samples):
        raise ValueError(f"features={samples.path}: the store is empty; run `mtp precompute`")
    checkpoint = Checkpoint.of(directory, target_config)

    def read_target(name: str) -> torch.Tensor:
        return checkpoint.read(name, dtype=torch.float32, device=torch.device("cpu"))

    validator: Validator | None = None
    is_inline = config.validate.placement == "inline"
    if config.trainer.validate_every and not is_inline:
        validator = SubprocessValidator(config, group=group)
    embedding: torch.Tensor | None = None
    lm_head: torch.Tensor | None = None
    serving_dtype = target_dtype(config.target, group.device)
    if config.trainer.validate_every and is_inline:
        target = open_target(config.target, device=group.device, runtime=config.runtime)
        validator = build_validator(config, target=target, group=group)
        if serving_dtype == dtype:
            embedding, lm_head = target.model.embedding_VD, lm_head_weight(target.model)
    if embedding is None or lm_head is None:
        embedding, lm_head = checkpoint.read_vocabulary(dtype=dtype, device=group.device)
        if validator is not None and is_inline:
            shared = {tensor.data_ptr(): tensor.nbytes for tensor in (embedding, lm_head)}
            logger.info(
                "training in %s beside validation in %s: %d bytes for an embedding and lm_head "
                "of its own",
                str(dtype).removeprefix("torch."),
                str(serving_dtype).removeprefix("torch."),
                sum(shared.values()),
            )
    draft_ids, draft_vocab, like = None, None, None
    method = config.head.init
    if method not in BUILT_IN_INITS and not is_checkpoint(Path(method)):
        like = load_head_spec(Path(method))
        draft_ids = read_draft_list(Path(method), size=config.head.draft_vocab_size)
    if config.head.draft_vocab_size:
        draft_ids, draft_vocab = choose_draft_vocab(
            _trained_rows(token_set, samples),
            size=config.head.draft_vocab_size,
            vocab_size=target_config.vocab_size,
            kept_W=draft_ids,
        )
    spec = make_head_spec(
        config.head, target_config, fingerprint=fingerprint, draft_vocab=draft_vocab, like=like
    )
    start: dict[str, Any] = {"head": head_settings(config.head, layer_ids)}
    if method == "native":
        initial = initial_native_head(directory, spec)
    elif method in BUILT_IN_INITS:
        own_head = None
        if spec.lm_head == "own":
            own_head = OwnHead(draft_ids, DraftTarget.of(lm_head, draft_ids).weight_WD)
        initial = initialise(
            spec,
            method=method,
            seed=derive_seed(config.seed, "head", method),
            initializer_range=_initializer_range(directory),
            num_target_layers=target_config.num_layers,
            read_target=read_target,
            own_head=own_head,
        )
    elif is_checkpoint(Path(method)):
        initial = initial_base_head(Path(method), spec, target_dir=directory)
        start["initial_weights"] = fingerprint_target(Path(method), cache_dir=cache)
    else:
        initial = read_initial_head(Path(method), spec)
        start["initial_weights"] = sha256_file(Path(method) / WEIGHTS_NAME)
    kept = None
    if config.loss.sub_vocab_size:
        kept = frequent_answer_ids(
            _trained_rows(token_set, samples),
            size=config.loss.sub_vocab_size,
            vocab_size=target_config.vocab_size,
        )
    normalisers: dict[int, torch.Tensor] = {}
    if (kept is not None and config.loss.logit_weight) or draft_vocab is not None:
        key = _normaliser_key(config, samples, lm_head)
        normalisers = load_normalisers(samples.path, key, samples.sample_ids)
    inputs = TrainInputs(
        spec=spec,
        initial=initial,
        embedding_VD=embedding,
        lm_head_VD=lm_head,
        samples=samples,
        kept_ids=kept,
        normalisers=normalisers,
        fingerprint={
            "target": fingerprint,
            "features": samples.manifest.fingerprint.digest(),
            "tokens": _content(config, token_set),
            **start,
        },
    )
    return inputs, validator


def choose_draft_vocab(
    rows: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    size: int,
    vocab_size: int,
    kept_W: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DraftVocab]:
    """The ids that a head with an ``lm_head`` of its own is trained over: ``kept_W``, the list of a
    head that training goes on from, or the ``size`` most frequent under the loss mask (int64,
    ascending). ``rows`` as in :func:`frequent_answer_ids`.

    Raises ``ValueError`` when ``size`` is not below ``vocab_size``.
    """
    if not 0 < size < vocab_size:
        raise ValueError(
            f"head.draft_vocab_size={size}: must be below the target's vocabulary of {vocab_size} "
            "(0 drafts from all of it)"
        )
    if kept_W is not None:
        ids_W, coverage = (
            kept_W,
            covered_share(count_answer_tokens(rows, vocab_size=vocab_size), kept_W),
        )
        logger.info("keeps the list of %d tokens: %.2f %% of answer tokens", size, 100 * coverage)
    else:
        ids_W, coverage = _most_frequent(rows, size, vocab_size, what="drafts from")
    return ids_W, DraftVocab(size=size, coverage=coverage, ids_sha256=hash_vocab_ids(ids_W))


def _most_frequent(
    rows: Iterable[tuple[np.ndarray, np.ndarray]], size: int, vocab_size: int, *, what: str
) -> tuple[torch.Tensor, float]:
    """Ids (int64, ascending) and the share of the answer tokens that they are."""
    counts_V = count_answer_tokens(rows, vocab_size=vocab_size)
    ids_W = most_frequent(counts_V, size)
    share = covered_share(counts_V, ids_W)
    logger.info("%s the %d most frequent answer tokens: %.2f %%", what, size, 100 * share)
    return ids_W, share


def _keep_normalisers(config: Config, inputs: TrainInputs, *, group: ProcessGroup) -> None:
    """Beside the store, for other runs over it (:mod:`mtp_train.normalisers`)."""
    samples = inputs.samples
    assert isinstance(samples, FeatureReader), "open_inputs reads a feature store"
    key = _normaliser_key(config, samples, inputs.lm_head_VD)
    save_normalisers(samples.path, key, samples.sample_ids, inputs.normalisers, rank=group.rank)


def _normaliser_key(
    config: Config, samples: FeatureReader, lm_head_VD: torch.Tensor
) -> NormaliserKey:
    return NormaliserKey(
        features=samples.manifest.fingerprint.digest(),
        dtype=str(lm_head_VD.dtype).removeprefix("torch."),
        device=lm_head_VD.device.type,
        row_chunk=config.loss.row_chunk,
    )


def frequent_answer_ids(
    rows: Iterable[tuple[np.ndarray, np.ndarray]], *, size: int, vocab_size: int
) -> torch.Tensor:
    """The ``size`` ids that occur most often under the loss mask (int64, ascending).

    ``rows``: token ids (integers ``[T]``) and loss mask (bool ``[T]``) of each sample. Ties go to
    the smaller id. Raises ``ValueError`` when ``size`` is not below ``vocab_size``.
    """
    if not 0 < size < vocab_size:
        raise ValueError(
            f"loss.sub_vocab_size={size}: must be below the target's vocabulary of {vocab_size} "
            "(0 uses all of it)"
        )
    return _most_frequent(rows, size, vocab_size, what="loss over")[0]


def _open_samples(store: Path, token_set: TokenSet, layer_ids: tuple[int, ...]) -> FeatureReader:
    """The store's samples that the train split names, with the residual streams ``layer_ids``.

    Raises ``ValueError`` when a sample is missing, or the streams are others.
    """
    wanted = set(token_set.train["sample_id"])
    samples = FeatureReader(store, select=wanted, with_layers=bool(layer_ids))
    stored = samples.manifest.fingerprint.layer_ids
    if layer_ids and stored != layer_ids:
        raise ValueError(
            f"features={store}: holds the residual streams of layers {list(stored)}, the head "
            f"reads {list(layer_ids)} (head.layer_ids); choose another features.path and run "
            "`mtp precompute` with this head"
        )
    num_quarantined = len(wanted) - len(samples)  # the reader refuses any other absence
    logger.info(
        "features: %d of %d samples of the train split%s",
        len(samples),
        len(wanted),
        f"; {num_quarantined} were quarantined" if num_quarantined else "",
    )
    return samples


def _trained_rows(
    token_set: TokenSet, samples: FeatureReader
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and mask of the token row of every sample, as far as it has states."""
    lengths = dict(zip(samples.sample_ids, samples.lengths.tolist(), strict=True))
    columns = token_set.train.select_columns(["sample_id", "input_ids", "loss_mask"])
    for table in columns.with_format("arrow").iter(_SCAN_ROWS):
        ids, masks = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
        flat_ids, flat_mask = (x.flatten().to_numpy(zero_copy_only=False) for x in (ids, masks))
        starts = (ids.offsets.to_numpy() - ids.offsets[0].as_py()).tolist()
        for sample_id, start in zip(table["sample_id"].to_pylist(), starts, strict=False):
            stop = start + lengths.pop(sample_id, 0)  # a repeated row is one sample
            yield flat_ids[start:stop], flat_mask[start:stop]


def _content(config: Config, token_set: TokenSet) -> dict[str, str]:
    """Content hashes of the splits that decide the result."""
    content = token_set.fingerprint["content"]
    splits = ("train", "validation") if config.trainer.validate_every else ("train",)
    return {split: content[split] for split in splits}


def training_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What a run of ``config`` trains in on such a device."""
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

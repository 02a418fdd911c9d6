"""The loaded target of a dump: what computes the states, and what P0 checks them against."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_train.config import Config, FeaturesConfig
from mtp_train.distributed import ProcessGroup, SingleProcessGroup
from mtp_train.features.p0 import DecodeReference, HuggingFaceReference, LogitsReference, P0Check
from mtp_train.features.sources import (
    FeatureSource,
    HuggingFaceSource,
    RuntimeSource,
    load_hugging_face,
)
from mtp_train.features.target import cache_directory, read_shape, target_dtype
from mtp_train.features.vllm_source import open_vllm_source
from mtp_train.layer_ids import choose_layer_ids
from runtime.cpu import set_threads
from runtime.models.base import Model
from runtime.models.config import load_config
from runtime.models.loader import load_target
from runtime.processor import count_physical_cores
from runtime.team import SoloTeam, Team

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workbench:
    """Source and check share the loaded weights where their dtypes agree."""

    source: FeatureSource
    check: P0Check

    @contextmanager
    def leading(self) -> Iterator[None]:
        """What the first of the ranks that share the weights does; lets the others go after it."""
        try:
            yield
        finally:
            if isinstance(self.source, RuntimeSource):
                self.source.engine.dismiss()

    def follow(self) -> None:
        """What the other ranks do meanwhile."""
        assert isinstance(self.source, RuntimeSource), "other sources are not spread over ranks"
        self.source.engine.follow()


def load_workbench(
    config: Config,
    directory: Path,
    *,
    group: ProcessGroup,
    max_len: int,
    tensor_group: ProcessGroup | None = None,
) -> Workbench:
    """Load the target for the chosen source and for the references of P0.

    ``group``: all ranks, which share the machine's cores. ``tensor_group``: those that share one
    copy of the weights (default: each process has its own). Its first rank asks source and check,
    the others call :meth:`Workbench.follow`; what is not spread is loaded by the first one only.
    """
    device = group.device
    dtype = target_dtype(config.target, device)
    if device.type == "cpu":
        threads = config.runtime.num_threads or count_physical_cores() // group.local_world_size
        set_threads(max(1, threads))
    features = config.features
    layer_ids = choose_layer_ids(config.head, num_layers=read_shape(directory).num_layers)
    tensor_group = tensor_group or SingleProcessGroup(device)
    team: Team | None = None
    model: Model | None = None
    if features.source == "runtime" or "decode" in features.p0_references:
        model = load_target(
            directory,
            dtype=dtype,
            device=device,
            attention=config.runtime.attention,
            attention_kernel=config.runtime.attention_kernel,
            stored_weights=config.runtime.stored_weights,
            int8_grid=config.runtime.int8_grid,
            kv_cache=config.runtime.kv_cache,
            expert_parallel=config.runtime.expert_parallel,
            cache_dir=cache_directory(config.target),
            group=tensor_group,
        ).model
        if layer_ids:
            model = model.tapped(layer_ids)
        team = SoloTeam(model)
    loaded: dict[torch.dtype, HuggingFaceSource] = {}

    def hugging_face(wanted: torch.dtype) -> HuggingFaceSource:
        if wanted not in loaded:
            loaded[wanted] = HuggingFaceSource(
                load_hugging_face(
                    directory,
                    dtype=wanted,
                    device=device,
                    trust_remote_code=config.target.trust_remote_code,
                ),
                max_batch_tokens=features.max_batch_tokens,
                layer_ids=layer_ids,
            )
        return loaded[wanted]

    source: FeatureSource
    if features.source == "runtime":
        assert model is not None, "the runtime source loads the runtime's model"
        source = RuntimeSource(model, max_batch_tokens=features.max_batch_tokens, max_len=max_len)
        team = source.engine.team
    elif features.source == "vllm":
        source = open_vllm_source(
            config, directory, device=device, max_len=max_len, layer_ids=layer_ids
        )
    else:
        source = hugging_face(dtype)
    references: list[LogitsReference] = []
    if "decode" in features.p0_references:
        assert team is not None, "the decode reference loads the runtime's model"
        references.append(DecodeReference(team))
    compares = "huggingface" in features.p0_references
    if compares and load_config(directory).rounds_inputs:
        _leave_out_hugging_face(features)
        compares = False
    if compares and tensor_group.is_leader:
        references.append(HuggingFaceReference(hugging_face(torch.float32)))
    check = P0Check(
        source,
        references,
        codec=features.codec,
        num_samples=features.p0_samples_per_shard,
        num_rows=features.p0_rows_per_sample,
        max_logprob_gap=features.p0_max_logprob_gap,
        max_kl=features.p0_max_kl,
        layer_ids=layer_ids,
        # Rows of a prefix that a foreign engine had cached would be wrong at the beginning.
        num_first_rows=features.p0_rows_per_sample if features.source == "vllm" else 0,
    )
    return Workbench(source, check)


def _leave_out_hugging_face(features: FeaturesConfig) -> None:
    reason = (
        "the target rounds its inputs, which two correct ways to it do differently; mtp validate "
        "compares with transformers without rounding (P0)"
    )
    if features.p0_references == ("huggingface",):
        raise ValueError(f"features.p0_references=[huggingface]: {reason}; name decode")
    logger.info("P0 of the shards without huggingface: %s", reason)

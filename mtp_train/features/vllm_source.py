"""Hidden states from vLLM: its residual streams, behind the target's final norm.

vLLM gives ``S_k`` for any ``k`` up to the number of layers, whose stream is what the final norm
gets; ``g`` is made of that one here. Norm and ``lm_head`` come from the checkpoint, so that the
references of P0 share nothing with this source. Shape legend: T tokens, a layers, D model width, M
rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mtp_train.config import Config
from mtp_train.export.layouts.base import TARGET_EMBEDDING, TARGET_LM_HEAD
from mtp_train.features.sources import FeatureSource, batches_by_length
from mtp_train.features.target import read_shape, target_dtype
from mtp_train.serving.engine import parse_argument
from mtp_train.serving.process import find_python
from mtp_train.serving.states import StatesJob, StatesProcess, Streams
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.request import HiddenRows

_FINAL_NORM = "model.norm.weight"
_ROOM = 2  # the token that vLLM samples behind a row, and its draft


class TargetOutput:
    """The target's final norm and ``lm_head``, read from its checkpoint in ``dtype``."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        config = load_config(directory)
        checkpoint = Checkpoint.of(directory, config)
        head = TARGET_EMBEDDING if config.tie_word_embeddings else TARGET_LM_HEAD
        weight = checkpoint.read_stored(_FINAL_NORM)
        self._norm_D = (weight + 1 if config.norm_form == "1+w" else weight).to(device, dtype)
        self._head_VD = checkpoint.read_stored(head).to(device, dtype)
        self._eps = config.norm_eps

    def norm(self, stream_TD: torch.Tensor) -> torch.Tensor:
        """RMSNorm with the mean in fp32, in the weights' dtype and on their device."""
        x_TD = stream_TD.to(self._norm_D.device).float()
        x_TD = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + self._eps)
        return x_TD.to(self._norm_D.dtype) * self._norm_D

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """fp32 ``[M, V]``."""
        return (hidden_MD.to(self._head_VD.device, self._head_VD.dtype) @ self._head_VD.T).float()


class VllmSource(FeatureSource):
    """vLLM's forward in a process of its own; ``layer_ids`` of the streams beside ``g``."""

    name = "vllm"

    def __init__(
        self,
        process: StatesProcess,
        output: TargetOutput,
        *,
        dtype: torch.dtype,
        max_batch_tokens: int,
    ) -> None:
        """``process`` gives the streams of ``layer_ids`` and, last, that before the final norm."""
        self.dtype = dtype
        self._process = process
        self._output = output
        self._max_batch_tokens = max_batch_tokens

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        batches = batches_by_length([len(ids) for ids in sequences], self._max_batch_tokens)
        asked = [[sequences[index] for index in batch] for batch in batches]
        for batch, found in zip(batches, self._process.streams(asked), strict=True):
            for index, streams in zip(batch, found, strict=True):
                yield self._rows(str(index), streams)

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self._output.logits(hidden_MD)

    def close(self) -> None:
        self._process.close()

    def _rows(self, key: str, streams: Streams) -> HiddenRows:
        taps_TaD = streams.streams_TaD[:, :-1]
        return HiddenRows(
            key,
            streams.token_ids,
            self._output.norm(streams.streams_TaD[:, -1]),
            layers_TE=taps_TaD.flatten(1).clone() if taps_TaD.shape[1] else None,
        )


def check_vllm_source(config: Config, *, world_size: int) -> None:
    """Raise ``ValueError`` unless vLLM can be started, before anything is loaded."""
    if not config.engine.python:
        raise ValueError(
            "features.source=vllm: it is started in an environment of yours; name its interpreter, "
            "as in engine.python=.venv-vllm/bin/python"
        )
    if world_size > 1:
        raise ValueError(
            f"features.source=vllm with {world_size} ranks: one asks, and vLLM itself is spread, "
            "as in +engine.args.tensor_parallel_size=2; start mtp precompute without torchrun"
        )
    find_python(config.engine.python)


def open_vllm_source(
    config: Config,
    directory: Path,
    *,
    device: torch.device,
    max_len: int,
    layer_ids: Sequence[int],
) -> VllmSource:
    """Start vLLM with the target in ``directory``. Raises ``ServingError`` in vLLM's own words."""
    dtype = target_dtype(config.target, device)
    shape = read_shape(directory)
    process = StatesProcess(
        StatesJob(
            target=directory,
            dtype=str(dtype).removeprefix("torch."),
            layer_ids=(*layer_ids, shape.num_layers),
            max_model_len=min(max_len + _ROOM, shape.max_position_embeddings),
            max_batch_tokens=config.features.max_batch_tokens,
            llm_args={name: parse_argument(text) for name, text in config.engine.args},
        ),
        python=find_python(config.engine.python),
        num_threads=config.runtime.num_threads,
        timeout_s=config.engine.timeout_s,
    )
    output = TargetOutput(directory, dtype=dtype, device=device)
    return VllmSource(
        process, output, dtype=dtype, max_batch_tokens=config.features.max_batch_tokens
    )

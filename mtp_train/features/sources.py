"""Where hidden states come from: our runtime, Hugging Face in the same dtype, or vLLM
(:mod:`mtp_train.features.vllm_source`).

All give ``g``, the target's hidden state *after* its final norm, one row per token, and the
logits of such rows; with ``layer_ids`` the residual streams ``S_k`` of these too. Shape legend: B
sequences, T tokens, M selected rows, D model width, E = len(layer_ids) * D, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.request import HiddenRows

_PAGE_SIZE = 16
_MAX_RUNNING = 64


class FeatureSource(ABC):
    """Computes hidden states of given token sequences."""

    name: str
    dtype: torch.dtype

    @abstractmethod
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        """One item per sequence, in any order; ``key`` is the sequence's index as text."""

    @abstractmethod
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Logits ``[M, V]`` fp32 of rows in the source's dtype, on any device."""

    def close(self) -> None:  # noqa: B027  most own nothing
        """End what the source has started."""


class RuntimeSource(FeatureSource):
    """The runtime's packed, chunked forward: ``max_batch_tokens`` rows at a time.

    Over several ranks the first one asks; the others follow its ``engine``. Residual streams are
    those that ``model`` gives (:meth:`runtime.models.llama.LlamaModel.tapped`).
    """

    name = "runtime"

    def __init__(self, model: Model, *, max_batch_tokens: int, max_len: int) -> None:
        self.model = model
        self.dtype = model.dtype
        # Living sequences hold at most two batches of rows and one sequence in progress.
        slots = 2 * max_batch_tokens + max_len + _MAX_RUNNING * _PAGE_SIZE
        config = EngineConfig(
            page_size=_PAGE_SIZE,
            num_pages=-(-slots // _PAGE_SIZE),
            max_running=min(_MAX_RUNNING, max_batch_tokens),
            max_model_len=max_len,
            max_batch_tokens=max_batch_tokens,
        )
        self.engine = Engine(model, config=config)
        self._max_batch_tokens = max_batch_tokens

    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        return self.engine.forward_hidden(sequences, max_batch_tokens=self._max_batch_tokens)

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self.engine.logits(hidden_MD.to(self.model.device, self.dtype)).float()


class HuggingFaceSource(FeatureSource):
    """``transformers``' forward over batches of sequences of similar length, padded on the right.

    No attention mask is given: under causal attention a row never sees the padding behind it.
    ``S_k`` is entry ``k`` of its ``hidden_states``, the input of decoder layer ``k``.
    """

    name = "huggingface"

    def __init__(self, model: Any, *, max_batch_tokens: int, layer_ids: Sequence[int] = ()) -> None:
        self._model = model.eval()
        self.dtype = model.dtype
        self._max_batch_tokens = max_batch_tokens
        self._layer_ids = tuple(layer_ids)

    @property
    def num_layers(self) -> int:
        return int(self._model.config.num_hidden_layers)

    @torch.inference_mode()
    def residuals(self, sequence: Sequence[int], layer_ids: Sequence[int]) -> list[torch.Tensor]:
        """``S_k`` of one sequence for each of ``layer_ids``, ``[T, D]`` each."""
        input_ids_1T = torch.as_tensor(sequence)[None].to(self._model.device)
        output = self._model.get_decoder()(
            input_ids=input_ids_1T, use_cache=False, output_hidden_states=True
        )
        return [output.hidden_states[layer_id][0] for layer_id in layer_ids]

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        decoder = self._model.get_decoder()
        for batch in batches_by_length([len(ids) for ids in sequences], self._max_batch_tokens):
            longest = max(len(sequences[index]) for index in batch)
            input_ids_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, index in enumerate(batch):
                input_ids_BT[row, : len(sequences[index])] = torch.as_tensor(sequences[index])
            output = decoder(
                input_ids=input_ids_BT.to(self._model.device),
                use_cache=False,
                output_hidden_states=bool(self._layer_ids),
            )
            for row, index in enumerate(batch):
                ids = tuple(sequences[index])
                streams = [output.hidden_states[k][row, : len(ids)] for k in self._layer_ids]
                yield HiddenRows(
                    str(index),
                    ids,
                    output.last_hidden_state[row, : len(ids)],
                    layers_TE=torch.cat(streams, -1) if streams else None,
                )

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        head = self._model.get_output_embeddings()
        return head(hidden_MD.to(self._model.device, self.dtype)).float()


def load_hugging_face(
    path: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> Any:
    """The causal language model in ``path`` (no network).

    Raises ``ValueError`` naming the package that transformers lacks for a quantised target.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except ImportError as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"target={path}: transformers cannot load it as a reference ({first_line}); install "
            "the extra `quantised`, or leave huggingface out (features.p0_references=[decode])"
        ) from error
    model = model.to(device).eval()
    if hasattr(model, "ct_decompress_hook"):
        # compressed-tensors unpacks weights in the first forward of the whole model; states are
        # asked of its decoder alone.
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.int64, device=device))
    return model


def batches_by_length(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Indices grouped so that batch size times longest length stays within the budget.

    Longest first. A sequence longer than the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * width > max_batch_tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches

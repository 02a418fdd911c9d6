"""What the ladder judges: one target and one head (native or exported), in the dtype a rung wants.

Everything comes from directories as a server would read them; nothing is handed over by a trainer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mtp_train.config import Config
from mtp_train.export.reader import load_any_head
from mtp_train.export.weights import hash_files
from mtp_train.features.target import cache_directory, target_dtype
from mtp_train.heads import build_training_head
from mtp_train.heads.base import TrainingHead
from mtp_train.validate.in_training import lm_head_weight
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec
from runtime.models.heads import build_head
from runtime.models.heads.mtp import MtpHead
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target, load_target
from runtime.request import HiddenRows

logger = logging.getLogger(__name__)


@dataclass
class Subject:
    """Target and head, each loaded once per dtype. ``runtime_dtype`` is what serving would use.

    fp32 gates need the target in fp32 beside the one in the run's dtype.
    """

    target_path: str | Path
    head_path: Path
    runtime_dtype: torch.dtype
    engine_config: EngineConfig
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cache_dir: Path | None = None
    may_differ: bool = False  # take a head of a target with the same sizes and other weights
    without_rounding: bool = False  # a quantised target whose linears read what they are given
    _targets: dict[torch.dtype, Target] = field(default_factory=dict, repr=False)
    _heads: dict[torch.dtype, MtpHead] = field(default_factory=dict, repr=False)
    _contract: tuple[HeadSpec, dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    _head_sha256: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def spec(self) -> HeadSpec:
        return self._load_head()[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._load_head()[1]

    @property
    def head_sha256(self) -> dict[str, str]:
        """Hashes of the head's files, taken when they were loaded."""
        self._load_head()
        return self._head_sha256

    @property
    def is_of_another_target(self) -> bool:
        """Whether the target has other weights than the head was trained for."""
        return self.spec.target_fingerprint != self.target(self.runtime_dtype).fingerprint

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """fp32 first, then the run's dtype where that is another one."""
        return tuple(dict.fromkeys((torch.float32, self.runtime_dtype)))

    @property
    def rounds_inputs(self) -> bool:
        """Whether linears of the target round what they read."""
        config = self.target(self.runtime_dtype).config
        return config.rounds_inputs and not self.without_rounding

    def target(self, dtype: torch.dtype) -> Target:
        if dtype not in self._targets:
            self._targets[dtype] = load_target(
                self.target_path,
                dtype=dtype,
                device=self.device,
                attention=self.engine_config.attention,
                attention_kernel=self.engine_config.attention_kernel,
                stored_weights=self.engine_config.stored_weights,
                int8_grid=self.engine_config.int8_grid,
                rounds_inputs=not self.without_rounding,
                kv_cache=self.engine_config.kv_cache,
                expert_parallel=self.engine_config.expert_parallel,
                cache_dir=self.cache_dir,
            )
        return self._targets[dtype]

    def unrounded(self) -> Subject:
        """The same where linears of the target do not round inputs: itself, or another function
        for comparison, loaded anew.
        """
        if not self.rounds_inputs:
            return self
        return replace(self, without_rounding=True, _targets={}, _heads={})

    def head(self, dtype: torch.dtype) -> MtpHead:
        """The inference head over :meth:`target`'s embedding and ``lm_head``."""
        if dtype not in self._heads:
            model = self.target(dtype).model
            self._heads[dtype] = build_head(self.spec, self.tensors, model)
        return self._heads[dtype]

    def training_head(self, dtype: torch.dtype) -> TrainingHead:
        """The differentiable twin with the exported weights.

        What its states are multiplied with is :meth:`draft_lm_heads`.
        """
        spec, tensors = self.spec, self.tensors
        if spec.lm_head == "target":  # it knows no draft vocabulary
            spec = replace(spec, draft_vocab=None)
            tensors = {n: t for n, t in tensors.items() if n != DRAFT_VOCAB_NAME}
        head = build_training_head(spec, dtype=dtype).to(self.device)
        head.load_tensors(tensors)
        return head.eval()

    def with_head(self, head_path: Path) -> Subject:
        """Another head over the same loaded target."""
        return replace(self, head_path=head_path, _heads={}, _contract=None, _head_sha256={})

    def embedding(self, dtype: torch.dtype) -> torch.Tensor:
        """``[V, D]``, the target's own tensor."""
        return self.target(dtype).model.embedding_VD

    def lm_head(self, dtype: torch.dtype) -> torch.Tensor:
        """``[V, D]``; a copy where the runtime has packed an untied head."""
        return lm_head_weight(self.target(dtype).model)

    def draft_lm_heads(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """``[W, D]`` for all steps, or one for each: the head's own, or the target's rows of
        :meth:`draft_columns`.
        """
        own = self.spec.own_lm_heads
        if own:
            return tuple(self.tensors[name].to(self.device, dtype) for name in own)
        lm_head_VD, columns = self.lm_head(dtype), self.draft_columns()
        return (lm_head_VD if columns is None else lm_head_VD[columns.to(lm_head_VD.device)],)

    def draft_columns(self) -> torch.Tensor | None:
        """Target ids the draft can propose, int64; ``None`` for the whole vocabulary."""
        return self.tensors.get(DRAFT_VOCAB_NAME)

    def feature_model(self, dtype: torch.dtype) -> LlamaModel:
        """The target, giving the residual streams that the head reads."""
        model, layer_ids = self.target(dtype).model, self.spec.layer_ids
        return model.tapped(layer_ids) if layer_ids else model

    def engine(self, dtype: torch.dtype, config: EngineConfig, *, with_head: bool) -> Engine:
        """An engine over :meth:`feature_model`."""
        target = self.target(dtype)
        return Engine(
            self.feature_model(dtype),
            config=config,
            eos_token_ids=target.eos_token_ids,
            draft=self.head(dtype) if with_head else None,
        )

    def _load_head(self) -> tuple[HeadSpec, dict[str, torch.Tensor]]:
        if self._contract is None:
            spec, tensors = load_any_head(self.head_path)
            self._head_sha256 = hash_files(self.head_path)
            fingerprint = self.target(self.runtime_dtype).fingerprint
            if spec.target_fingerprint != fingerprint:
                self._check_difference(spec, fingerprint)
            self._contract = spec, tensors
        return self._contract

    def _check_difference(self, spec: HeadSpec, fingerprint: str) -> None:
        """Raise ``ValueError``, unless the target may have other weights and has the sizes."""
        message = (
            f"head={self.head_path}: trained for target {spec.target_fingerprint[:12]}, "
            f"but target={self.target_path} is {fingerprint[:12]}"
        )
        if not self.may_differ:
            raise ValueError(message)
        target = self.target(self.runtime_dtype).config
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(spec, name), getattr(target, name)
            if ours != theirs:
                raise ValueError(
                    f"{message}: {name}={ours} there, {theirs} here; it cannot draft for this one"
                )
        if spec.layer_ids and max(spec.layer_ids) > target.num_layers:
            raise ValueError(
                f"{message}: it reads layer {max(spec.layer_ids)}, there are {target.num_layers}"
            )
        logger.warning("%s; measured as it is", message)


def open_subject(
    config: Config, head_path: Path, *, device: torch.device, may_differ: bool = False
) -> Subject:
    """The configuration's target with the head in ``head_path``, in the dtype that is served."""
    return Subject(
        target_path=config.target.path,
        head_path=head_path,
        runtime_dtype=target_dtype(config.target, device),
        engine_config=config.runtime,
        device=device,
        cache_dir=cache_directory(config.target),
        may_differ=may_differ,
    )


def whole_rows(rows: HiddenRows) -> torch.Tensor:
    """The target's rows as it gave them: ``g`` and the residual streams behind it; a copy."""
    if rows.layers_TE is None:
        return rows.hidden_TD.clone()
    return torch.cat((rows.hidden_TD, rows.layers_TE), 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """``max |got - wanted| / max |wanted|`` in float64; 0 for empty tensors."""
    if not wanted.numel():
        return 0.0
    scale = wanted.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((got.double() - wanted.double()).abs().max() / scale)

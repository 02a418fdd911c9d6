"""Validation during training: loss, tau and rates from the runtime, not from the training forward.

All ranks call the validator at the same step; each decodes its share of the prompts and scores its
share of the validation rows with its own engine, and integer counts are all-reduced. Prompts come
from the token set's validation split, never from an evaluation set.

Shape legend: T tokens of one row, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mtp_train.config import Config, LossConfig
from mtp_train.distributed import ProcessGroup
from mtp_train.draft_loss import DraftTarget, draft_head_loss
from mtp_train.losses import head_loss, loss_weight, target_log_normaliser
from mtp_train.packing import pack
from mtp_train.validate.measure import decode_waves, fit_engine, make_requests
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import HeadSpec
from runtime.metrics import Acceptance, pool_acceptance
from runtime.models.heads import build_head
from runtime.models.heads.mtp import MtpHead
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target
from runtime.request import HiddenRows
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

NO_VALIDATION_ROWS = (
    "the validation split has no row with a prompt and an answer: prepare the data again with a "
    "larger data.validation_share (in a run of another name, or after removing this run's data/), "
    "or train without validation (trainer.validate_every=0)"
)


@dataclass(frozen=True)
class ValidationRow:
    """One held-out row. The prompt is everything before the first token under the mask."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...] = field(repr=False)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        first = self.loss_mask.index(True) if True in self.loss_mask else len(self.input_ids)
        return self.input_ids[:first]


@dataclass(frozen=True)
class ValidationResult:
    """Figures of one validation, equal on all ranks. ``loss`` is of the first step, over the full
    vocabulary, with the weights of ``config.loss``; ``tau`` is untrimmed, ``rates`` are by
    position.
    """

    step: int
    loss: float
    loss_hidden: float
    loss_logit: float
    tau: float
    rates: tuple[float, ...]
    conditional_rates: tuple[float, ...]
    num_drafts: int
    num_loss_rows: int
    k: int
    temperature: float
    num_prompts: int
    wall_s: float


class RuntimeValidator:
    """Call it with ``(step, spec, tensors)`` on every rank; tensors are the gathered head.

    The head is built over the target's own embedding and ``lm_head``. Raises ``ValueError`` when no
    validation row has a prompt.
    """

    def __init__(
        self, target: Target, config: Config, rows: Iterable[ValidationRow], group: ProcessGroup
    ) -> None:
        self._target = target
        self._loss_config = config.loss
        self._settings = config.validate
        self._runtime = config.runtime
        self._group = group
        all_rows = list(rows)
        prompts = choose_prompts(all_rows, config.validate.num_prompts)
        if not prompts:
            raise ValueError(NO_VALIDATION_ROWS)
        self._num_prompts = len(prompts)
        requests = make_requests(
            prompts,
            max_tokens=config.validate.max_tokens,
            temperature=config.validate.temperature,
            seed=derive_seed(config.seed, "validation"),
        )
        self._requests = requests[group.rank :: group.world_size]
        self._rows = [row for row in all_rows if any(row.loss_mask[2:])][
            group.rank :: group.world_size
        ]
        self._lm_head_VD = lm_head_weight(target.model)

    def __call__(
        self, step: int, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> ValidationResult:
        started = time.perf_counter()
        head = build_head(spec, tensors, self._target.model)
        losses = self._loss_sums(head)
        acceptance = self._acceptance(head)
        loss, hidden, logit = (value / max(losses[3], 1.0) for value in losses[:3])
        return ValidationResult(
            step=step,
            loss=loss,
            loss_hidden=hidden,
            loss_logit=logit,
            tau=acceptance.tau,
            rates=acceptance.rates,
            conditional_rates=acceptance.conditional_rates,
            num_drafts=acceptance.num_drafts,
            num_loss_rows=int(losses[3]),
            k=acceptance.k,
            temperature=self._settings.temperature,
            num_prompts=self._num_prompts,
            wall_s=time.perf_counter() - started,
        )

    def _loss_sums(self, head: MtpHead) -> list[float]:
        """Total, hidden part, logit part and weight, summed over rows and ranks."""
        sums = [0.0] * 4
        if self._rows:
            sums = validation_loss_sums(
                self._target,
                head,
                self._rows,
                engine_config=self._runtime,
                loss=self._loss_config,
                lm_head_VD=self._lm_head_VD,
            )
        total = torch.tensor(sums, dtype=torch.float64, device=self._group.device)
        return [float(value) for value in self._group.all_reduce(total).tolist()]

    def _acceptance(self, head: MtpHead) -> Acceptance:
        settings = self._settings
        k = settings.k
        counts = Acceptance(k, 0, (0,) * k, (0,) * k)
        if self._requests:
            generations = decode_waves(
                self._target, self._requests, head=head, k=k, engine_config=self._runtime
            )
            counts = pool_acceptance(generations, k)
        return reduce_acceptance(counts, self._group)


def build_validator(config: Config, *, target: Target, group: ProcessGroup) -> RuntimeValidator:
    """The validator over the token set that ``config`` names."""
    from data_prep.token_set import load_token_set
    from mtp_train.run_dir import RunDirectory

    token_set = load_token_set(RunDirectory.from_config(config).data)
    rows = [ValidationRow(row.input_ids, row.loss_mask) for row in token_set.rows("validation")]
    return RuntimeValidator(target, config, rows, group)


def choose_prompts(rows: Sequence[ValidationRow], count: int) -> list[tuple[int, ...]]:
    """``count`` distinct prompts, evenly spaced over the split. Unanswered rows have none."""
    prompts = list(
        dict.fromkeys(row.prompt_ids for row in rows if row.prompt_ids and any(row.loss_mask))
    )
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def reduce_acceptance(counts: Acceptance, group: ProcessGroup) -> Acceptance:
    """Add up the counts of all ranks (a collective)."""
    k = counts.k
    values = group.all_reduce_ints(
        [counts.num_drafts, counts.num_clipped, *counts.accepted, *counts.accepted_trimmed]
    )
    return Acceptance(
        k, values[0], tuple(values[2 : 2 + k]), tuple(values[2 + k :]), num_clipped=values[1]
    )


@dataclass(frozen=True)
class _RuntimeSample:
    """One row as packing reads it: ids, mask and the runtime's own target states."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor = field(repr=False)
    layers: torch.Tensor | None = field(default=None, repr=False)


@torch.inference_mode()
def validation_loss_sums(
    target: Target,
    head: MtpHead,
    rows: Sequence[ValidationRow],
    *,
    engine_config: EngineConfig,
    loss: LossConfig,
    lm_head_VD: torch.Tensor,
) -> list[float]:
    """``[total, hidden, logit, weight]`` of the trainer's first-step loss, from runtime states.

    Target and head states come out of ``Engine.forward_draft``; the alignment of states and labels
    is the trainer's own packing. Always over the full vocabulary, also when training uses part; of
    a head with an ``lm_head`` of its own over what it drafts from.
    """
    config = fit_engine(
        engine_config,
        [len(row.input_ids) for row in rows],
        max_tokens=1,
        k=1,
        max_running=engine_config.max_running,
    )
    engine = Engine(target.model, config=config, draft=head)
    sums = [0.0] * 4
    for states in engine.forward_draft([row.input_ids for row in rows]):
        row = rows[int(states.key)]
        for index, value in enumerate(_row_loss(head, states, row, loss, lm_head_VD)):
            sums[index] += value
    return sums


def _row_loss(
    head: MtpHead,
    states: HiddenRows,
    row: ValidationRow,
    loss: LossConfig,
    lm_head_VD: torch.Tensor,
) -> tuple[float, float, float, float]:
    assert states.draft_TD is not None, "forward_draft returns the head's states"
    spec, device, dtype = head.spec, states.hidden_TD.device, states.hidden_TD.dtype
    sample = _RuntimeSample(
        torch.tensor(states.token_ids),
        torch.tensor(row.loss_mask),
        states.hidden_TD.cpu(),
        None if states.layers_TE is None else states.layers_TE.cpu(),
    )
    lse = None
    if spec.draft_vocab is not None:
        lse_T = target_log_normaliser(states.hidden_TD, lm_head_VD, row_chunk=loss.row_chunk)
        lse = [lse_T.cpu()]
    batch = pack([sample], num_steps=1, target_lse=lse, of_layers=spec.reads_layers)
    batch = batch.to(device, dtype)
    head_ND = head.state_for_logits(states.draft_TD)[batch.steps[0].rows_N]
    if spec.lm_head == "own":
        target = DraftTarget.of(lm_head_VD, head.draft_vocab_ids)
        own_WD = head.lm_head_of(states.draft_TD).dense_weight()
        parts = draft_head_loss([head_ND], batch, [own_WD], target, config=loss)
    else:
        parts = head_loss([head_ND], batch, lm_head_VD, config=loss)
    weight = loss_weight(batch.num_active, step_decay=loss.step_decay)
    return float(parts.total), float(parts.hidden), float(parts.logit), weight


def lm_head_weight(model: LlamaModel) -> torch.Tensor:
    """``lm_head`` as ``[V, D]``: the embedding itself where tied; else the plain weight, which is a
    copy (and logged) when the runtime has packed it.
    """
    if model.config.tie_word_embeddings:
        return model.embedding_VD
    weight_VD = model.lm_head.dense_weight()
    if model.lm_head.is_packed:
        size = weight_VD.numel() * weight_VD.element_size()
        logger.info("validation holds an unpacked lm_head beside the packed one: %d bytes", size)
    return weight_VD

"""What one micro-batch of training takes: the trainer's own head and loss, run on ``meta`` tensors.

Nothing is computed, so any target can be asked about; whatever the head and the loss do is counted
as they do it. Beyond a few thousand tokens everything grows in proportion, and is extended so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from mtp_train.config import LossConfig
from mtp_train.draft_loss import DraftTarget, draft_head_loss
from mtp_train.heads import build_training_head
from mtp_train.losses import SubVocabulary, head_loss
from mtp_train.packing import HeadBatch, UnrollStep, pack
from mtp_train.plan.operator_meter import OperatorMeter
from runtime.head_spec import HeadSpec

_META = torch.device("meta")
_LARGEST_RUN = 2048  # tokens that are really counted


@dataclass(frozen=True)
class Rows:
    """Length of the training rows, and how many of their last tokens carry loss."""

    num_tokens: int
    num_answer_tokens: int


@dataclass(frozen=True)
class StepCost:
    """One micro-batch. Bytes of tensors and operations of matrix products.

    ``kept`` is what autograd holds between forward and backward; ``loss`` and ``backward`` are what
    comes on top at their peak, parameters and their gradients left out.
    """

    batch_bytes: float
    kept_bytes: float
    loss_bytes: float
    backward_bytes: float
    forward_flops: float
    loss_flops: float
    backward_flops: float

    @property
    def peak_bytes(self) -> float:
        return self.batch_bytes + self.kept_bytes + max(self.loss_bytes, self.backward_bytes)

    @property
    def flops(self) -> float:
        return self.forward_flops + self.loss_flops + self.backward_flops


class StepCosts:
    """Costs of micro-batches of one head, loss and row length, by their number of tokens."""

    def __init__(self, spec: HeadSpec, loss: LossConfig, rows: Rows, *, dtype: torch.dtype) -> None:
        self._spec, self._loss, self._rows, self._dtype = spec, loss, rows, dtype
        self._counted: dict[int, StepCost] = {}

    def of(self, num_tokens: int) -> StepCost:
        """``num_tokens`` in rows of the given length and one shorter row for the rest."""
        largest = max(_LARGEST_RUN, 2 * self._rows.num_tokens)
        if num_tokens <= largest:
            return self._count(num_tokens)
        half, whole = self._count(largest // 2), self._count(largest)
        share = (num_tokens - largest) / (largest - largest // 2)
        values = {}
        for field in fields(StepCost):
            low, high = getattr(half, field.name), getattr(whole, field.name)
            values[field.name] = high + share * max(0.0, high - low)
        return StepCost(**values)

    def _count(self, num_tokens: int) -> StepCost:
        if num_tokens not in self._counted:
            self._counted[num_tokens] = count_step(
                self._spec, self._loss, self._rows, num_tokens=num_tokens, dtype=self._dtype
            )
        return self._counted[num_tokens]


def count_step(
    spec: HeadSpec, loss: LossConfig, rows: Rows, *, num_tokens: int, dtype: torch.dtype
) -> StepCost:
    """Run head, loss and backward of one micro-batch on ``meta`` tensors."""
    with _META:
        head = build_training_head(spec, dtype=dtype)
    for parameter in head.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=_META)
    sub_vocab, draft_target = _sub_vocabulary(spec, loss, dtype), _draft_target(spec, dtype)
    with_lse = sub_vocab is not None or spec.draft_vocab is not None
    batch = _batch(spec, loss, rows, num_tokens, dtype, with_lse=with_lse)
    inputs = list(_tensors(batch))
    known = [embedding, *head.parameters(), *head.buffers(), *inputs]
    if sub_vocab is not None:
        known += [sub_vocab.ids_W, sub_vocab.weight_WD]
    if draft_target is not None:
        known.append(draft_target.weight_WD)
    with OperatorMeter(known) as meter:
        own_head = {} if draft_target is None else {"with_lm_head": True}
        states = head(batch, embedding, **own_head)
        kept, forward = meter.now, meter.flops
        meter.restart_peak()
        if draft_target is not None:
            count = loss.num_unroll_steps
            parts = draft_head_loss(
                states[:count], batch, states[count:], draft_target, config=loss
            )
        else:
            parts = head_loss(states, batch, embedding, config=loss, sub_vocab=sub_vocab)
        loss_peak, in_loss = meter.peak, meter.flops - forward
        total = parts.total
        del states, parts
        meter.restart_peak()
        total.backward()
        return StepCost(
            batch_bytes=sum(tensor.nbytes for tensor in inputs),
            kept_bytes=kept,
            loss_bytes=loss_peak - kept,
            backward_bytes=max(0, meter.peak - kept),
            forward_flops=forward,
            loss_flops=in_loss,
            backward_flops=meter.flops - forward - in_loss,
        )


@dataclass(frozen=True)
class _Row:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    layers: torch.Tensor | None = None


def _batch(
    spec: HeadSpec,
    loss: LossConfig,
    rows: Rows,
    num_tokens: int,
    dtype: torch.dtype,
    *,
    with_lse: bool,
) -> HeadBatch:
    whole, rest = divmod(num_tokens, rows.num_tokens)
    lengths = [rows.num_tokens] * whole + ([rest] if rest else [])
    prompt_share = 1 - rows.num_answer_tokens / rows.num_tokens
    samples = []
    for length in lengths:
        mask = torch.arange(length) >= round(prompt_share * length)
        hidden = torch.empty(length, spec.hidden_size, dtype=dtype, device=_META)
        layers = None
        if spec.reads_layers:
            layers = torch.empty(length, spec.input_size, dtype=dtype, device=_META)
        samples.append(_Row(torch.zeros(length, dtype=torch.int64), mask, hidden, layers))
    lses = [torch.zeros(length) for length in lengths] if with_lse else None
    batch = pack(
        samples,
        num_steps=loss.num_unroll_steps,
        target_lse=lses,
        of_layers=spec.reads_layers,
    )
    return batch.to(_META, dtype)


def _sub_vocabulary(spec: HeadSpec, loss: LossConfig, dtype: torch.dtype) -> SubVocabulary | None:
    if not loss.sub_vocab_size or not loss.logit_weight:
        return None
    width = loss.sub_vocab_size + min(loss.tail_sample_size, spec.vocab_size - loss.sub_vocab_size)
    return SubVocabulary(
        torch.empty(width, dtype=torch.int64, device=_META),
        torch.empty(width, spec.hidden_size, dtype=dtype, device=_META),
        loss.sub_vocab_size,
        0.0,
    )


def _draft_target(spec: HeadSpec, dtype: torch.dtype) -> DraftTarget | None:
    """Of a head with an ``lm_head`` of its own; rows that are not the target's whole matrix."""
    if spec.lm_head != "own":
        return None
    weight = torch.empty(spec.draft_vocab_size, spec.hidden_size, dtype=dtype, device=_META)
    return DraftTarget(weight, is_whole=spec.draft_vocab is None)


def _tensors(batch: HeadBatch) -> Iterator[torch.Tensor]:
    parts: tuple[HeadBatch | UnrollStep, ...] = (batch, *batch.steps)
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, torch.Tensor):
                yield value


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None

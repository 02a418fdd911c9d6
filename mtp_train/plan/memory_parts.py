"""Parts of a training rank's memory, and the sum of those that last from step to step.

Letters as in :mod:`bill`: H weights of the head, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_train.config import Config, HeadConfig, LossConfig
from mtp_train.features.codecs import bytes_per_row
from mtp_train.plan.facts import TargetFacts, count_weights, plan_head_spec
from mtp_train.plan.step_cost import StepCost
from mtp_train.plan.zero_states import head_states


@dataclass(frozen=True)
class Part:
    """Bytes on one device."""

    name: str
    num_bytes: float
    formula: str


def lasting_bytes(
    config: Config,
    facts: TargetFacts,
    *,
    dtype: torch.dtype,
    tokens_read: int,
) -> float:
    """What one CPU process keeps between steps that trains so, does not validate and has
    read each of ``tokens_read`` tokens once.
    """
    states = head_states(
        count_weights(plan_head_spec(facts, config.head)),
        zero_stage=config.deepspeed.zero_stage,
        ranks=1,
        width=dtype.itemsize,
        is_cpu=True,
        offload=config.deepspeed.offload,
        optimizer=config.trainer.optimizer,
    )
    embedding = float(facts.num_embedding_weights * dtype.itemsize)
    parts = copied_rows(config.loss, config.head, facts, dtype.itemsize)
    parts += host_parts(config, facts, seen=tokens_read, num_tokens=tokens_read)
    return embedding + sum(p.num_bytes for p in parts) + states.total + states.offloaded


def copied_rows(
    loss: LossConfig, head: HeadConfig, facts: TargetFacts, width: int
) -> tuple[Part, ...]:
    """Rows of the target's ``lm_head`` over which there is a loss, where these are not all."""
    columns = loss.sub_vocab_size + loss.tail_sample_size if loss.sub_vocab_size else 0
    columns = columns or head.draft_vocab_size
    if not columns:
        return ()
    size = float(columns * facts.hidden_size * width)
    return (Part("frequent lm_head rows", size, f"{columns:,} x D x {width} B"),)


def host_parts(
    config: Config, facts: TargetFacts, *, seen: float, num_tokens: float
) -> tuple[Part, ...]:
    """What else a rank keeps in the host's memory. Only bills of CPUs have it."""
    spec = plan_head_spec(facts, config.head)
    weights = count_weights(spec)
    read = min(seen, num_tokens)
    states = 1 + len(spec.layer_ids)
    row = states * bytes_per_row(config.features.codec, facts.hidden_size)
    parts = [
        Part("first weights", 4.0 * weights, "H x 4 B, as the run started"),
        Part("features read", read * row, f"{read:,.0f} tokens x {row} B, mapped from the store"),
    ]
    if config.loss.sub_vocab_size or spec.draft_vocab is not None:
        parts.append(Part("normalisers", 4.0 * read, f"{read:,.0f} tokens x 4 B"))
    return tuple(parts)


def cost_parts(cost: StepCost, tokens: int) -> tuple[Part, ...]:
    more = max(cost.loss_bytes, cost.backward_bytes)
    which = "loss" if cost.loss_bytes >= cost.backward_bytes else "backward"
    return (
        Part("batch", cost.batch_bytes, f"features and targets of {tokens:,} tokens and one row"),
        Part("activations", cost.kept_bytes, "what autograd keeps, counted on meta tensors"),
        Part("loss chunk", more, f"peak of loss and backward, here {which}, counted likewise"),
    )

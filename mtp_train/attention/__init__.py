"""Ragged causal attention for training: a per-sample prefix plus each row's own recycled chain."""

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.blockwise import BLOCKWISE, BlockwiseAttention
from mtp_train.attention.choice import (
    AttentionChoice,
    AttentionName,
    choose_attention,
    decide_attention,
)
from mtp_train.attention.plan import (
    AttentionPlan,
    ChainStep,
    QueryBlock,
    cut_queries,
    extend_chain,
)

__all__ = [
    "BLOCKWISE",
    "AttentionChoice",
    "AttentionName",
    "AttentionPlan",
    "BlockwiseAttention",
    "ChainStep",
    "QueryBlock",
    "TrainingAttention",
    "choose_attention",
    "cut_queries",
    "decide_attention",
    "extend_chain",
]

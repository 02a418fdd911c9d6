"""Ragged causal attention for training: a per-sample prefix plus each row's own recycled chain."""

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.blockwise import BLOCKWISE, BlockwiseAttention
from mtp_train.attention.choice import AttentionName, choose_attention
from mtp_train.attention.plan import (
    AttentionPlan,
    ChainStep,
    QueryBlock,
    cut_queries,
    extend_chain,
)

__all__ = [
    "BLOCKWISE",
    "AttentionName",
    "AttentionPlan",
    "BlockwiseAttention",
    "ChainStep",
    "QueryBlock",
    "TrainingAttention",
    "choose_attention",
    "cut_queries",
    "extend_chain",
]

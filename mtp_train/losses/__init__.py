"""Losses between a head's states and the target's: smooth-L1, and a choice between distributions.

`formulas` holds what a row loses, `core` the pass over rows and vocabulary, `sub_vocabulary` the
loss over the ids that matter, `unroll` what couples the steps of a start, `objective` the sum that
training minimises.
"""

from mtp_train.losses.core import ChunkSizes, distribution_loss_sum
from mtp_train.losses.formulas import row_formula
from mtp_train.losses.objective import (
    LossParts,
    head_loss,
    loss_weight,
    smooth_l1_sum,
    soft_cross_entropy_sum,
)
from mtp_train.losses.softmax import target_log_normaliser
from mtp_train.losses.sub_vocabulary import SubVocabulary, TailSampler
from mtp_train.losses.unroll import ExpectedLength

__all__ = [
    "ChunkSizes",
    "ExpectedLength",
    "LossParts",
    "SubVocabulary",
    "TailSampler",
    "distribution_loss_sum",
    "head_loss",
    "loss_weight",
    "row_formula",
    "smooth_l1_sum",
    "soft_cross_entropy_sum",
    "target_log_normaliser",
]

"""A model with layers left out, as a draft of the model it comes from.

Every weight is shared, so that such a draft costs no memory but its own K/V. How often its drafts
are accepted depends on the layers that are kept: a model was never trained to do without one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from runtime.models.llama import LlamaModel


def keep_layers(model: LlamaModel, layers: Sequence[int]) -> LlamaModel:
    """``model`` with only ``layers`` (indices from 0, increasing), over the same weights.

    Raises ``ValueError`` for no layer, one that the model does not have, or another order.
    """
    count = len(model.blocks)
    is_increasing = all(a < b for a, b in pairwise(layers))
    if not layers or not is_increasing or layers[0] < 0 or layers[-1] >= count:
        raise ValueError(
            f"layers={list(layers)}: name at least one layer of 0..{count - 1}, in increasing order"
        )
    kept = copy.copy(model)
    kept.config = replace(model.config, num_layers=len(layers))
    kept.blocks = [model.blocks[layer] for layer in layers]
    if model.fp8_cache is not None:
        kept.fp8_cache = model.fp8_cache.of_layers(layers)
    return kept

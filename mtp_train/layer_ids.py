"""Which residual streams of the target a head reads.

``S_k`` is the residual stream after ``k`` decoder layers, without the final norm: the output of
layer ``k - 1`` counted from 0, the input of layer ``k``, and entry ``k`` of ``hidden_states`` of
Hugging Face.
"""

from __future__ import annotations

from typing import Any

from mtp_train.config import HeadConfig
from runtime.models.llama import check_layer_ids


def choose_layer_ids(head: HeadConfig, *, num_layers: int) -> tuple[int, ...]:
    """The k of the ``S_k`` that ``head`` reads beside ``g``; none unless ``kind=eagle3``.

    Without ``head.layer_ids`` they are those of vLLM and SGLang: 2, ``num_layers // 2`` and
    ``num_layers - 3``. Raises ``ValueError`` where the target has no such layers.
    """
    if head.kind != "eagle3":
        return ()
    chosen = head.layer_ids or (2, num_layers // 2, num_layers - 3)
    check_layer_ids(chosen, num_layers=num_layers, field="head.layer_ids")
    return chosen


def source_fields(head: HeadConfig, *, num_layers: int) -> dict[str, Any]:
    """The fields of a ``HeadSpec`` that say what ``head`` reads of a target and what it drafts
    with. Raises ``ValueError`` as :func:`choose_layer_ids` does.
    """
    layer_ids = choose_layer_ids(head, num_layers=num_layers)
    return {
        "hidden_source": "layers" if layer_ids else "g",
        "layer_ids": layer_ids,
        "fusion_norm": head.fusion_norm,
        "residual": "normed" if head.norm_before_residual else "standard",
        "lm_head": "own" if head.kind == "eagle3" or head.own_lm_heads else "target",
    }

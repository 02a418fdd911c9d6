"""The tokens a head would draft from its own states: arg-maxes without ``rows x V``.

Shape legend: N rows, D model width, V vocabulary.
"""

from __future__ import annotations

import torch

_LOGIT_ROWS = 512  # rows whose logits exist at once


@torch.no_grad()
def own_tokens(states_ND: torch.Tensor, lm_head_VD: torch.Tensor) -> torch.Tensor:
    """Ids, int64 ``[N]``, of the largest logits (in ``lm_head``'s dtype); ties go to the smaller.

    No gradient flows through them.
    """
    picked = [
        (chunk.to(lm_head_VD.dtype) @ lm_head_VD.t()).argmax(-1)
        for chunk in states_ND.split(_LOGIT_ROWS)
        if len(chunk)
    ]
    none = torch.empty(0, dtype=torch.int64, device=states_ND.device)
    return torch.cat(picked) if picked else none

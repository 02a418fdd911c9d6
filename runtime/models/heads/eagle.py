"""The head of EAGLE-1 (Li et al. 2024, arXiv:2401.15077): ``fc([e; g])`` → one decoder layer
without its first norm → the target's ``lm_head``. No final norm; the state is recycled as it is.

That is :class:`MtpHead` without the norms that it puts back, so its arithmetic is computed there;
``HeadSpec`` holds ``kind=eagle`` to the published choices.
"""

from __future__ import annotations

from runtime.models.heads.mtp import MtpHead


class EagleHead(MtpHead):
    """``fc`` is ``eh_proj``, with a bias where ``spec.projection_bias`` says so."""

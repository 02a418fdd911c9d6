"""The differentiable head of EAGLE-1, the published baseline: the training twin of
``runtime.models.heads.eagle``.

The MTP head without the norms that it puts back, and with states recycled as they are;
``HeadSpec`` holds ``kind=eagle`` to that.
"""

from __future__ import annotations

from mtp_train.heads.mtp import MtpHead


class EagleHead(MtpHead):
    """``fc`` is ``eh_proj``, with a bias where ``spec.projection_bias`` says so."""

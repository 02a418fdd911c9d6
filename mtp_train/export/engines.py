"""Which serving engines can draft as a head does, and why others cannot.

Read from the engines' layouts, not from trials: whether a head was really served is P6's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.export import layout
from runtime.head_spec import HeadSpec

_NO_PLACE_FOR_A_LIST = (
    "no layout of an MTP head has a place for a list of draft ids: vLLM and SGLang draft with the "
    "target's whole lm_head. EAGLE-3 directories have one (d2t); SGLang also takes a list beside a "
    "model, --speculative-token-map, which has not been run"
)


@dataclass(frozen=True)
class Servable:
    """``engines`` load an export of the head and draft the same tokens; none: see ``why``."""

    engines: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return ", ".join(self.engines) if self.engines else "this runtime only"


def servable_by(spec: HeadSpec) -> Servable:
    """The engines that can serve a head of this contract as it is."""
    if spec.draft_vocab is not None:
        return Servable((), _NO_PLACE_FOR_A_LIST)
    try:
        layout.refuse_uncarried(spec, drop_draft_vocab=False)
    except ValueError as error:
        return Servable((), str(error))
    return Servable(("vLLM", "SGLang"), "exported in the mimo layout")

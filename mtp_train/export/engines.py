"""Which serving engines can draft as a head does, and why others cannot.

Read from the engines' layouts, not from trials: whether a head was really served is P6's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.export.layouts import LAYOUTS, Layout
from runtime.head_spec import HeadSpec

_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_NO_PLACE_FOR_A_LIST = (
    "no layout of such a head has a place for a list of draft ids: vLLM and SGLang draft with the "
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
    of_kind = [layout for layout in LAYOUTS.values() if layout.kind == spec.kind]
    if spec.draft_vocab is not None and not any(one.carries_draft_vocab for one in of_kind):
        return Servable((), _NO_PLACE_FOR_A_LIST)
    refusals = {layout.name: _refusal(layout, spec) for layout in of_kind or LAYOUTS.values()}
    carrying = [layout for layout in of_kind if not refusals[layout.name]]
    if not carrying:
        return Servable((), next(iter(refusals.values())))
    engines = [_TITLES[engine] for layout in carrying for engine in layout.engines]
    names = " or ".join(layout.name for layout in carrying)
    return Servable(tuple(dict.fromkeys(engines)), f"exported in the {names} layout")


def _refusal(layout: Layout, spec: HeadSpec) -> str:
    try:
        layout.refuse_uncarried(spec, drop_draft_vocab=False)
    except ValueError as error:
        return str(error)
    return ""

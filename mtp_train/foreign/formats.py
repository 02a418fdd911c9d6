"""The formats that head directories come in, which engines have a class for each, and ours.

Read from the engines' loaders (vLLM 0.33, SGLang 0.5.23), not from trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mtp_train.config import HeadFormat

Engine = Literal["vLLM", "SGLang"]
# How a loader treats surprises: as vLLM's EAGLE classes do, as its MTP classes do, or not at all.
Family = Literal["eagle", "mtp", "none"]

_NO_CLASS = "has no class for it"
_MEDUSA_GONE = "had a class for it up to 0.30"


@dataclass(frozen=True)
class Format:
    """``refused_by``: engines that cannot serve it at all, and why. ``not_read``: why it cannot
    become one of our heads; empty where it can.
    """

    key: HeadFormat
    title: str
    family: Family
    refused_by: Mapping[Engine, str]
    not_read: str = ""

    @property
    def is_read(self) -> bool:
        return not self.not_read


def _format(
    key: HeadFormat,
    title: str,
    family: Family,
    *,
    vllm: str = "",
    sglang: str = "",
    not_read: str = "",
) -> Format:
    both: dict[Engine, str] = {"vLLM": vllm, "SGLang": sglang}
    refused = {engine: why for engine, why in both.items() if why}
    return Format(key, title, family, MappingProxyType(refused), not_read)


_NATIVE = "reads exports only; `mtp export` writes them"
_SPECULATORS_ONLY = "does not read the speculators format"
_NOT_TRAINED = "recognised only: heads of this kind are not trained here"

FORMATS: Mapping[HeadFormat, Format] = MappingProxyType(
    {
        entry.key: entry
        for entry in (
            _format("native", "native head of mtp train", "none", vllm=_NATIVE, sglang=_NATIVE),
            _format("eagle", "EAGLE-1", "eagle"),
            _format(
                "speculators_eagle",
                "speculators EAGLE-1",
                "eagle",
                vllm="reads speculators' eagle3, peagle, dflash and dspark only",
                sglang=_SPECULATORS_ONLY,
            ),
            _format("eagle3", "EAGLE-3", "eagle"),
            _format("speculators_eagle3", "speculators EAGLE-3", "eagle", sglang=_SPECULATORS_ONLY),
            _format("mimo", "MTP, MiMo layout", "mtp"),
            _format("deepseek_mtp", "MTP, DeepSeek layout", "mtp"),
            _format(
                "qwen_mtp",
                "MTP, Qwen layout",
                "mtp",
                not_read="its attention has output gates, which this runtime does not compute",
            ),
            _format(
                "speculators_mtp",
                "speculators MTP",
                "mtp",
                vllm="does not read it: put it back into the target's checkpoint (mtp.*) first",
                sglang=_SPECULATORS_ONLY,
            ),
            _format("medusa", "Medusa", "none", sglang=_NO_CLASS),
            _format(
                "mlp_speculator",
                "MLP speculator",
                "none",
                vllm=_MEDUSA_GONE,
                sglang=_NO_CLASS,
                not_read=_NOT_TRAINED,
            ),
            _format("peagle", "P-EAGLE", "eagle", sglang=_NO_CLASS, not_read=_NOT_TRAINED),
            _format("dflash", "DFlash", "eagle", not_read=_NOT_TRAINED),
            _format("dspark", "DSpark", "eagle", not_read=_NOT_TRAINED),
        )
    }
)

"""One reader for each format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mtp_train.config import HeadFormat
from mtp_train.foreign.eagle import EagleReader
from mtp_train.foreign.eagle3 import Eagle3Reader
from mtp_train.foreign.medusa import MedusaReader
from mtp_train.foreign.mtp import MtpReader
from mtp_train.foreign.mtp_sparse import QwenMtpReader
from mtp_train.foreign.others import BlockDrafterReader, NamedOnlyReader, NativeReader
from mtp_train.foreign.reading import FormatReader

READERS: Mapping[HeadFormat, FormatReader] = MappingProxyType(
    {
        "native": NativeReader(),
        "eagle": EagleReader(),
        "speculators_eagle": EagleReader(),
        "eagle3": Eagle3Reader(),
        "speculators_eagle3": Eagle3Reader(),
        "peagle": Eagle3Reader(),
        "mimo": MtpReader("mimo"),
        "deepseek_mtp": MtpReader("deepseek_mtp"),
        "speculators_mtp": MtpReader("speculators_mtp"),
        "qwen_mtp": QwenMtpReader(),
        "medusa": MedusaReader(),
        "mlp_speculator": NamedOnlyReader(),
        "dflash": BlockDrafterReader(),
        "dspark": BlockDrafterReader(),
    }
)

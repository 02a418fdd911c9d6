"""The formats that serving engines read: one module and one :class:`Layout` for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mtp_train.config import ExportFormat
from mtp_train.export.layouts.base import Layout
from mtp_train.export.layouts.deepseek import DeepseekLayout
from mtp_train.export.layouts.eagle import EagleSglangLayout, EagleVllmLayout
from mtp_train.export.layouts.eagle3 import Eagle3Layout
from mtp_train.export.layouts.medusa import MedusaLayout
from mtp_train.export.layouts.mimo import MimoLayout
from mtp_train.export.layouts.speculators import SpeculatorsLayout

LAYOUTS: Mapping[ExportFormat, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            MimoLayout(),
            DeepseekLayout(),
            Eagle3Layout(),
            SpeculatorsLayout(),
            EagleVllmLayout(),
            EagleSglangLayout(),
            MedusaLayout(),
        )
    }
)


def find_layout(format: str) -> Layout:
    """The layout of ``export.format``. Raises ``ValueError`` for a name that is none."""
    for name, layout in LAYOUTS.items():
        if name == format:
            return layout
    raise ValueError(f"export.format={format!r}; supported: {', '.join(LAYOUTS)}")


__all__ = ["LAYOUTS", "Layout", "find_layout"]

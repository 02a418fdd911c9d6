"""Heads for serving engines: written under a strict contract, checked, and read back.

``mtp_train.export.stage`` is the command; it is not imported here, because it needs the ladder, and
the ladder reads exported heads.
"""

from __future__ import annotations

from mtp_train.export.commands import refresh_readme, serving_commands
from mtp_train.export.reader import check_export, is_export, load_any_head, read_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.export.writer import ExportReport, write_export

__all__ = [
    "EXPORT_NAME",
    "ExportRecord",
    "ExportReport",
    "check_export",
    "is_export",
    "load_any_head",
    "read_export",
    "refresh_readme",
    "serving_commands",
    "write_export",
]

"""The parity ladder and the acceptance measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_train.config import Config
    from mtp_train.distributed import ProcessGroup
    from mtp_train.validate.journal import RungJournal
    from mtp_train.validate.report import LadderReport


def run(config: Config, *, group: ProcessGroup, journal: RungJournal | None = None) -> LadderReport:
    """Climb the ladder (a collective); see :func:`mtp_train.validate.ladder.run`."""
    from mtp_train.validate import ladder  # heavy, and a command starts through this package

    return ladder.run(config, group=group, journal=journal)

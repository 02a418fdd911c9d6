"""The learning curve that a run belongs to: the runs beside it that carry its ``run.group``, as the
members of a sweep do.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mtp_train.compare.build import build
from mtp_train.compare.reader import read_records
from mtp_train.config import CompareConfig
from mtp_train.learning_curve.facts import LearningCurve
from mtp_train.recorded import read_settings
from mtp_train.report.json_values import mapping, text

logger = logging.getLogger(__name__)

_NO_GROUP = (
    "What doubling the data would bring is not known: this run has no run.group, whose other runs "
    "would be the sizes of a curve. `mtp train -m … trainer.max_tokens=a,b,c` trains such a group "
    "over the same features, and `mtp compare` fits any runs."
)


def group_curve(root: Path) -> LearningCurve:
    """Refused in words where there is no group or no curve in it. A run that cannot be read is left
    out with a warning: this run's report must not depend on it.
    """
    group = _group(root)
    if not group:
        return LearningCurve(refusal=_NO_GROUP)
    found = []
    for place in sorted(path for path in root.absolute().parent.iterdir() if path.is_dir()):
        try:
            if _group(place) == group:
                found.append(read_records(place))
        except ValueError as error:
            logger.warning("learning curve of %s without %s: %s", group, place.name, error)
    return build(found, CompareConfig()).curve


def _group(root: Path) -> str:
    return text(mapping(read_settings(root).get("run")).get("group"))

"""A run directory into :class:`RunFacts`. Reads its files and nothing else; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.recorded import read_yaml
from mtp_train.report.facts import RunFacts, Texts
from mtp_train.report.json_values import mapping, text, whole
from mtp_train.report.logbook import read_logbook
from mtp_train.report.parity import read_parity
from mtp_train.report.samples import read_texts
from mtp_train.report.stores import last_part, read_stores
from mtp_train.run_dir import PARITY_NAME

_MIN_DRAFTS = 3000
_ANY_OF = ("config.yaml", "events.jsonl", PARITY_NAME)  # a run has one of these


@dataclass(frozen=True)
class _Places:
    """Where the run's recorded configuration says its parts are."""

    data: Path
    features: Path
    head: Path

    @classmethod
    def of(cls, root: Path, settings: Mapping[str, Any]) -> _Places:
        def place(section: str, key: str, default: str) -> Path:
            given = text(mapping(settings.get(section)).get(key))
            return Path(given) if given else root / default

        return cls(
            data=place("data", "path", "data"),
            features=place("features", "path", "features"),
            head=place("validate", "head", "head"),
        )


def read_run(root: Path, *, max_samples: int) -> RunFacts:
    """``max_samples=0`` leaves all texts out, the training row included.

    Raises ``ValueError`` when there is no such run, or naming a damaged file.
    """
    if not any((root / name).is_file() for name in _ANY_OF):
        raise ValueError(f"run.name={root.name}: there is no run at {root}")
    settings = _read_settings(root / "config.yaml")
    places = _Places.of(root, settings)
    target = text(mapping(settings.get("target")).get("path"))
    return RunFacts(
        name=root.name,
        target=last_part(target),
        min_drafts=whole(mapping(settings.get("validate")).get("min_drafts")) or _MIN_DRAFTS,
        parity=read_parity(root / PARITY_NAME, places.head),
        logbook=read_logbook(root / "events.jsonl"),
        stores=read_stores(root, data=places.data, features=places.features, settings=settings),
        texts=read_texts(root / "samples.json", max_samples=max_samples)
        if max_samples
        else Texts(),
    )


def _read_settings(file: Path) -> Mapping[str, Any]:
    return mapping(read_yaml(file)) if file.is_file() else {}

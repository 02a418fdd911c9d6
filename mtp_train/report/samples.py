"""``samples.json`` into records: generated texts with where each token came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train.report.facts import Sample, Texts, Token, TrainingRow
from mtp_train.report.json_values import mapping, number, rows, text, whole
from mtp_train.run_dir import read_json


def read_texts(file: Path, *, max_samples: int) -> Texts:
    """Empty where there is no file. Raises ``ValueError`` naming a damaged one."""
    if not file.is_file():
        return Texts()
    content = read_json(file)
    return Texts(
        k=whole(content.get("k")) or 0,
        samples=tuple(_sample(row) for row in rows(content.get("samples"))[:max_samples]),
        training_row=_training_row(mapping(content.get("training_row"))),
    )


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        prompt_set=text(row.get("prompt_set")),
        category=text(row.get("category")),
        prompt=text(row.get("prompt")),
        tau=number(row.get("tau")),
        tokens=tuple(
            Token(
                text(token.get("text")),
                position=(whole(token.get("position")) or 1) if token.get("by") == "draft" else 0,
            )
            for token in rows(row.get("tokens"))
        ),
    )


def _training_row(row: Mapping[str, Any]) -> TrainingRow | None:
    tokens = tuple(
        (text(token.get("text")), token.get("mask") is True) for token in rows(row.get("tokens"))
    )
    return TrainingRow(text(row.get("sample_id")), tokens) if tokens else None

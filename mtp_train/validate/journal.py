"""Rungs that a killed ladder had finished, so that the next one goes on above them.

One file per run, replaced after each rung and gone once ``parity.json`` is written. It belongs to
everything that the figures depend on: under other settings, or with another head, it is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.validate.report import DecodeSpeed, RungResult, SpeedResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRung:
    """A verdict, and the speed rows where the rung measured any."""

    result: RungResult
    speed: tuple[SpeedResult, ...] = ()


@dataclass(frozen=True)
class RungJournal:
    """The finished rungs of one ladder that has not come to its end.

    ``inputs`` is a hash of everything that the figures depend on, ``head_sha256`` the part of it
    that a training run may replace meanwhile.
    """

    path: Path
    inputs: str
    head_sha256: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, inputs: Mapping[str, Any]) -> RungJournal:
        """The journal at ``path`` for a ladder with these inputs (JSON values, ``head`` among
        them).
        """
        text = json.dumps(inputs, sort_keys=True)
        return cls(path, hashlib.sha256(text.encode()).hexdigest(), dict(inputs["head"]))

    def read(self) -> dict[str, FinishedRung]:
        """By name; empty when there is none of these inputs."""
        if not self.path.is_file():
            return {}
        content = read_json(self.path)
        if content["inputs"] != self.inputs:
            logger.info("%s is of another head or other settings: starting over", self.path)
            return {}
        return {entry["result"]["name"]: _parse(entry) for entry in content["rungs"]}

    def write(self, rungs: Sequence[FinishedRung]) -> None:
        """Replace what is there."""
        content = {"finished": False, "inputs": self.inputs, "rungs": [asdict(r) for r in rungs]}
        write_json_atomic(self.path, content)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _parse(entry: Mapping[str, Any]) -> FinishedRung:
    speed = [
        SpeedResult(
            **{**row, "draft": DecodeSpeed(**row["draft"]), "plain": DecodeSpeed(**row["plain"])}
        )
        for row in entry["speed"]
    ]
    return FinishedRung(RungResult(**entry["result"]), tuple(speed))

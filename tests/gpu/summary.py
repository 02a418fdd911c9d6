"""What `run.sh` found: tables of the checks and the figures, and whether all is well.

Reads what is there: a run that was cut off has half a file, or none.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SKIP = ("name", "seconds", "skipped", "failed")


@dataclass(frozen=True)
class Check:
    """One test. ``result``: passed, skipped, failure or error."""

    name: str
    result: str
    seconds: float
    why: str = ""


def read_checks(path: Path) -> list[Check] | None:
    """The tests of a JUnit file; ``None`` where there is none, or a broken one."""
    try:
        root = ElementTree.parse(path)
    except (FileNotFoundError, ElementTree.ParseError):
        return None
    checks = []
    for case in root.iter("testcase"):
        bad = next((c for c in case if c.tag in ("failure", "error", "skipped")), None)
        why = "" if bad is None else (bad.get("message") or "").splitlines()[:1]
        checks.append(
            Check(
                name=case.get("name", ""),
                result="passed" if bad is None else bad.tag,
                seconds=float(case.get("time", 0)),
                why=why[0] if why else "",
            )
        )
    return checks


def read_figures(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file, in order; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def describe_checks(checks: Iterable[Check]) -> list[str]:
    lines = [f"{'check':76} {'result':8} {'s':>7}"]
    for check in checks:
        lines.append(f"{check.name[:76]:76} {check.result:8} {check.seconds:7.2f}")
        if check.result in ("failure", "error"):
            lines.append(f"    {check.why[:150]}")
    return lines


def describe_figures(rows: Iterable[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        name = row.get("name", "?")
        if "failed" in row or "skipped" in row:
            word = "failed" if "failed" in row else "skipped"
            lines.append(f"{name:14} {word}: {row[word][:150]}")
            continue
        values = (f"{key}={_short(value)}" for key, value in row.items() if key not in _SKIP)
        lines.append(f"{name:14} " + "  ".join(values))
    return lines


def verdict(
    checks: Sequence[Check] | None, rows: Sequence[dict[str, Any]], *, figures_only: bool
) -> str:
    """Empty: everything ran and passed. Otherwise what did not."""
    if checks is None and not figures_only:
        return "the checks did not finish"
    bad = [check.name for check in checks or () if check.result in ("failure", "error")]
    if bad:
        return f"{len(bad)} checks failed: {', '.join(bad)}"
    if not figures_only and not any(check.result == "passed" for check in checks or ()):
        return "no check ran"
    failed = [row["name"] for row in rows if "failed" in row]
    if failed:
        return f"figures failed: {', '.join(failed)}"
    return "" if rows else "no figure was measured"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    place = Path(argv[0])
    checks, rows = read_checks(place / "checks.xml"), read_figures(place / "figures.jsonl")
    lines = [*describe_checks(checks or ()), "", *describe_figures(rows), ""]
    wrong = verdict(checks, rows, figures_only="--figures-only" in argv[1:])
    lines.append(f"NOT WELL: {wrong}" if wrong else "all is well")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

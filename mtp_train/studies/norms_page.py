"""Figure and tables of ``docs/norms.md``, from the committed results and nothing else.

    python -m mtp_train.studies.norms_page docs/norms.json docs/norms.md docs/norms.svg

Intervals of acceptance resample prompts and, where there are several, seeds: all heads of a
condition decode the same prompts, so a difference is taken inside each resample. Those of losses
are Student's over seeds: runs of one seed see the same rows in the same order.

Shape legend: S seeds, P prompts, R resamples.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtp_train.report.svg import Margins, Plot, Scale, linear_scale
from mtp_train.run_dir import read_json, write_text_atomic
from mtp_train.validate.bootstrap import Interval

logger = logging.getLogger(__name__)

ALL, FREE = "all", "none (EAGLE)"
SETS = {"mtbench": "MT-Bench", "long_prompts": "long prompts"}
TRAINED_ON = {"short_chats": "short chats", "long_prompts": "long prompts"}
_TAIL = 0.25  # share of the steps whose mean is the final loss
_NUM_RESAMPLES = 4000
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 %, by number of seeds
_COLOURS = {
    ALL: "#1b6ca8",
    "no enorm, hnorm": "#8a5a00",
    FREE: "#c0392b",
    "no input": "#2e8b57",
    "no final": "#7b4fa3",
    "all, target's": "#16a3a3",
}
_RATE = 1e-3  # the recipe's learning rate; runs at others are a table of their own
_TABLES = ("norms", "rates")
_MARKS = {name: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->") for name in _TABLES}


@dataclass(frozen=True)
class Condition:
    """What all heads of a comparison share."""

    trained_on: str
    scale: float
    num_outliers: int
    outlier_scale: float

    @property
    def conditioning(self) -> str:
        """``D`` in words."""
        if self.num_outliers:
            factor = self.scale * self.outlier_scale
            return f"×{self.scale:g}, {self.num_outliers} channels ×{factor:g}"
        return f"×{self.scale:g}"


@dataclass(frozen=True)
class Cell:
    """All seeds of one head in one condition. Counts are ``[S, P]`` by prompt set."""

    seeds: tuple[int, ...]
    losses: tuple[np.ndarray, ...] = field(repr=False)  # [T] per seed; T differs by a step or two
    drafts: Mapping[str, np.ndarray] = field(repr=False)
    accepted: Mapping[str, np.ndarray] = field(repr=False)

    @property
    def final_losses(self) -> np.ndarray:
        """Mean over the last quarter of the steps, ``[S]``."""
        tails = [losses_T[-max(1, round(_TAIL * len(losses_T))) :] for losses_T in self.losses]
        return np.array([tail_T.mean() for tail_T in tails])

    @property
    def curve(self) -> np.ndarray:
        """Mean over seeds of every step that all of them have, ``[T]``."""
        shared = min(len(losses_T) for losses_T in self.losses)
        mean_T: np.ndarray = np.mean([losses_T[:shared] for losses_T in self.losses], axis=0)
        return mean_T

    def rate(self, prompt_set: str) -> float:
        """Accepted ÷ steps, pooled."""
        return float(self.accepted[prompt_set].sum() / max(1, self.drafts[prompt_set].sum()))


@dataclass(frozen=True)
class Difference:
    """Other minus reference."""

    value: float
    interval: Interval | None  # None: one seed, where seeds are what is resampled


Cells = Mapping[Condition, Mapping[str, Cell]]


def collect(results: Mapping[str, Any]) -> dict[Condition, dict[str, Cell]]:
    """Runs by condition and head, at the recipe's learning rate. A head whose final norm starts at
    the target's has its own name.

    Raises ``ValueError`` when two runs of one head and condition share a seed.
    """
    grouped: dict[Condition, dict[str, list[Mapping[str, Any]]]] = {}
    for row in results["runs"]:
        if row["learning_rate"] != _RATE:
            continue
        condition, head = _condition(row), _head(row)
        grouped.setdefault(condition, {}).setdefault(head, []).append(row)
    return {
        condition: {head: _cell(sorted(rows, key=lambda r: r["seed"])) for head, rows in by.items()}
        for condition, by in sorted(grouped.items(), key=lambda item: _order(item[0]))
    }


def _condition(row: Mapping[str, Any]) -> Condition:
    keys = ("prompts", "scale", "num_outliers", "outlier_scale")
    return Condition(*(row[key] for key in keys))


def _head(row: Mapping[str, Any]) -> str:
    return str(row["head"]) if row["init"] == "random" else f"{row['head']}, target's"


def _order(condition: Condition) -> tuple[float, int, int]:
    return (
        condition.scale,
        condition.num_outliers,
        list(TRAINED_ON).index(condition.trained_on),
    )


def _cell(rows: Sequence[Mapping[str, Any]]) -> Cell:
    seeds = tuple(row["seed"] for row in rows)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"runs: seed given twice among {[row['name'] for row in rows]}")
    counts = {
        part: {
            name: np.array([row["acceptance"][name][part] for row in rows], dtype=np.int64)
            for name in SETS
        }
        for part in ("drafts", "accepted")
    }
    losses = tuple(np.array(row["losses"]) for row in rows)
    return Cell(seeds, losses, counts["drafts"], counts["accepted"])


def rate_difference(
    other: Cell, reference: Cell, prompt_set: str, *, level: float = 0.95, seed: int = 0
) -> Difference:
    """Acceptance of ``other`` minus ``reference``, with a bootstrap over seeds and prompts."""
    random = np.random.default_rng(seed)
    shared = [s for s in other.seeds if s in reference.seeds]
    sides = []
    for cell in (other, reference):
        index = [cell.seeds.index(s) for s in shared]
        sides.append((cell.drafts[prompt_set][index], cell.accepted[prompt_set][index]))
    num_seeds, num_prompts = sides[0][0].shape
    seeds_RS = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), _NUM_RESAMPLES)
    prompts_RP = random.multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), _NUM_RESAMPLES
    )
    values_R = np.zeros(_NUM_RESAMPLES)
    value = 0.0
    for sign, (drafts_SP, accepted_SP) in zip((1, -1), sides, strict=True):
        drafts_R, accepted_R = (
            np.einsum("rs,sp,rp->r", seeds_RS, counts_SP, prompts_RP)
            for counts_SP in (drafts_SP, accepted_SP)
        )
        values_R += sign * accepted_R / np.maximum(drafts_R, 1)
        value += sign * float(accepted_SP.sum() / max(1, drafts_SP.sum()))
    low, high = np.quantile(values_R, [(1 - level) / 2, (1 + level) / 2])
    return Difference(value, Interval(float(low), float(high), level))


def loss_difference(other: Cell, reference: Cell) -> Difference:
    """Final loss of ``other`` minus ``reference``, paired by seed."""
    shared = [s for s in other.seeds if s in reference.seeds]
    gaps = np.array(
        [
            other.final_losses[other.seeds.index(s)]
            - reference.final_losses[reference.seeds.index(s)]
            for s in shared
        ]
    )
    if len(gaps) < 2:
        return Difference(float(gaps.mean()), None)
    half = _STUDENT[len(gaps)] * gaps.std(ddof=1) / math.sqrt(len(gaps))
    middle = float(gaps.mean())
    return Difference(middle, Interval(middle - half, middle + half, 0.95))


def table(cells: Cells) -> str:
    """One row per condition and head, against all norms of the same condition."""
    columns = ["trained on", "D", "norms", "seeds", "final loss", "− all norms"]
    for prompt_set in SETS.values():
        columns += [f"accepted, {prompt_set}", "− all norms, points"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for condition, by in cells.items():
        reference = by.get(ALL)
        for name in sorted(by, key=list(_COLOURS).index):
            cell = by[name]
            row = [
                TRAINED_ON[condition.trained_on],
                condition.conditioning,
                name,
                str(len(cell.seeds)),
                f"{cell.final_losses.mean():.3f}",
            ]
            against = reference if name != ALL else None
            row.append(_loss_text(loss_difference(cell, against)) if against else "")
            for prompt_set in SETS:
                row.append(f"{100 * cell.rate(prompt_set):.1f} %")
                row.append(_points(rate_difference(cell, against, prompt_set)) if against else "")
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def rate_table(results: Mapping[str, Any]) -> str:
    """Final losses by learning rate, one seed, where more than the recipe's was tried."""
    losses: dict[tuple[Condition, str], dict[float, float]] = {}
    others = [row for row in results["runs"] if row["learning_rate"] != _RATE]
    seeds = {row["seed"] for row in others}
    for row in results["runs"]:
        if row["seed"] in seeds:
            by_rate = losses.setdefault((_condition(row), _head(row)), {})
            by_rate[row["learning_rate"]] = float(_cell([row]).final_losses[0])
    rates = sorted({row["learning_rate"] for row in others} | {_RATE})
    columns = ["trained on", "D", "norms", *(f"{rate:g}" for rate in rates)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for (condition, head), by_rate in sorted(losses.items(), key=lambda i: _order(i[0][0])):
        if len(by_rate) < 2:
            continue
        cells = [f"{by_rate[rate]:.3f}" if rate in by_rate else "" for rate in rates]
        row_ = [TRAINED_ON[condition.trained_on], condition.conditioning, head, *cells]
        lines.append("| " + " | ".join(row_) + " |")
    return "\n".join(lines)


def _loss_text(difference: Difference) -> str:
    if difference.interval is None:
        return f"{difference.value:+.3f}"
    return (
        f"{difference.value:+.3f} [{difference.interval.low:+.3f}, {difference.interval.high:+.3f}]"
    )


def _points(difference: Difference) -> str:
    text = f"{100 * difference.value:+.1f}"
    if difference.interval is None:
        return text
    return f"{text} [{100 * difference.interval.low:+.1f}, {100 * difference.interval.high:+.1f}]"


def figure(cells: Cells) -> str:
    """Losses of every step, one panel per condition; below, acceptance of every seed."""
    diagonals = list(dict.fromkeys(c.conditioning for c in cells))
    width, height, gap = 300.0, 210.0, 34.0
    parts, legend = [], _legend(cells)
    for row, trained_on in enumerate(TRAINED_ON):
        for column, diagonal in enumerate(diagonals):
            found = [
                by
                for condition, by in cells.items()
                if (condition.trained_on, condition.conditioning) == (trained_on, diagonal)
            ]
            if not found:
                continue
            x, y = column * width, gap + row * 2 * height
            title = f"{TRAINED_ON[trained_on]}, D = {diagonal}"
            parts.append(_place(_losses(found[0], title, width, height), x, y, width, height))
            rates = _rates(found[0], width, height)
            parts.append(_place(rates, x, y + height, width, height))
    total_w, total_h = width * len(diagonals), gap + 4 * height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w:g} {total_h:g}" '
        f'width="{total_w:g}" height="{total_h:g}"><style>{_style()}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{legend}{"".join(parts)}</svg>\n'
    )


def _losses(by: Mapping[str, Cell], title: str, width: float, height: float) -> str:
    num_steps = max(len(cell.curve) for cell in by.values())
    highest = max(float(cell.curve.max()) for cell in by.values())
    plot = Plot(
        width,
        height,
        linear_scale(0, num_steps, count=4),
        linear_scale(0, max(20.0, math.ceil(highest / 5) * 5), count=4),
        title,
        Margins(top=26),
    )
    plot.axes("step, and loss in nats")
    plot.text(plot.margins.left, 14, title, "title")
    for name in _drawn(by):
        points = [(index + 1.0, float(value)) for index, value in enumerate(by[name].curve)]
        plot.line(points, f"line c{_index(name)}")
    return plot.render()


def _rates(by: Mapping[str, Cell], width: float, height: float) -> str:
    names = _drawn(by)
    plot = Plot(
        width, height, Scale(0, 2, ()), linear_scale(0, 25, count=5, unit=" %"), "acceptance"
    )
    plot.axes("")
    for index, (prompt_set, label) in enumerate(SETS.items()):
        plot.text(plot.at_x(index + 0.5), plot.bottom + 18, label, "axis", anchor="middle")
        for place, name in enumerate(names):
            cell = by[name]
            x = index + (place + 1) / (len(names) + 1)
            rates = 100 * cell.accepted[prompt_set].sum(1) / cell.drafts[prompt_set].sum(1)
            low, high = plot.at_y(0.0), plot.at_y(100 * cell.rate(prompt_set))
            plot.rect(plot.at_x(x) - 7, high, 14, low - high, f"bar c{_index(name)}")
            for rate in rates.tolist():
                plot.mark(x, rate, "circle", "seed")
    return plot.render()


def _drawn(by: Mapping[str, Cell]) -> list[str]:
    return sorted(by, key=list(_COLOURS).index)


def _index(name: str) -> int:
    return list(_COLOURS).index(name)


def _legend(cells: Cells) -> str:
    names = [n for n in _COLOURS if any(n in by for by in cells.values())]
    parts = []
    for place, name in enumerate(names):
        x = 48 + 132 * place
        parts.append(
            f'<rect class="bar c{_index(name)}" x="{x}" y="10" width="12" height="12"/>'
            f'<text class="axis" x="{x + 17}" y="20">{name}</text>'
        )
    return "".join(parts)


def _place(svg: str, x: float, y: float, width: float, height: float) -> str:
    return f'<svg x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}">{svg}</svg>'


def _style() -> str:
    colours = "".join(
        f".line.c{i}{{stroke:{c}}}.bar.c{i}{{fill:{c}}}" for i, c in enumerate(_COLOURS.values())
    )
    return (
        "text{font:12px sans-serif;fill:#333}.tick{fill:#666;font-size:11px}"
        ".title{font-weight:bold}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.6}"
        f".seed{{fill:#000;fill-opacity:.45}}{colours}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace the tables between the markers of the page, and the figure."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m mtp_train.studies.norms_page")
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("figure", type=Path)
    given = parser.parse_args(arguments)
    results = read_json(given.results)
    cells = collect(results)
    text = given.page.read_text(encoding="utf-8")
    for name, made in zip(_TABLES, (table(cells), rate_table(results)), strict=True):
        begin, end = _MARKS[name]
        if begin not in text or end not in text:
            parser.error(f"{given.page}: has no {begin} and {end}")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    write_text_atomic(given.page, text)
    write_text_atomic(given.figure, figure(cells))


if __name__ == "__main__":
    main()

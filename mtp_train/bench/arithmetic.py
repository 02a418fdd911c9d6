"""From runs of cells to figures: rates, percentiles, paired intervals, winners.

Rounds are interleaved, so that a speed-up is a ratio of two runs that stood beside each other. Its
interval is Student's, of the mean of the log ratios.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from mtp_train.bench.facts import Answer, Cell, CellRun, Column, Contestant, Estimate, Spread
from mtp_train.serving.job import DraftCounts

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them 2 is taken.
_STUDENT = MappingProxyType(
    dict(
        enumerate(
            (
                *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
                *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
            ),
            start=1,
        )
    )
)
_STUDENT_BEYOND = 2.086


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between order statistics, as ``numpy.percentile``. ``values`` is not empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float]) -> Spread | None:
    found = list(values)
    return Spread(percentile(found, 0.5), percentile(found, 0.95)) if found else None


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Mean and interval; ``None`` of nothing."""
    if not values:
        return None
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = _STUDENT.get(count - 1, _STUDENT_BEYOND) * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half)


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """Geometric mean of paired ratios and its interval; values are positive."""
    logs = mean_of([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    if logs is None:
        return None
    if logs.low is None or logs.high is None:
        return Estimate(math.exp(logs.value))
    return Estimate(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high))


def tau_of(counts: DraftCounts) -> float | None:
    """Tokens per verification step: what was accepted, and the target's own. ``None`` of none."""
    return 1 + sum(counts.accepted) / counts.drafts if counts.drafts else None


def acceptance_of(counts: DraftCounts) -> tuple[float, ...]:
    """Share of drafts that got past each position."""
    return tuple(count / counts.drafts for count in counts.accepted) if counts.drafts else ()


def equal_share(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float | None:
    """Share of questions that both answered, with the same text; ``None`` where there is none."""
    there = {answer.question: answer.text for answer in theirs}
    both = [answer for answer in ours if answer.question in there]
    if not both:
        return None
    return sum(answer.text == there[answer.question] for answer in both) / len(both)


def summarise(
    contestants: Sequence[Contestant], runs: Sequence[CellRun], *, min_equal: float
) -> list[Cell]:
    """A cell for every contestant and concurrency that was tried, in order."""
    plain = next((item.name for item in contestants if item.is_plain), "")
    columns = sorted({run.concurrency for run in runs})
    cells = []
    for contestant in contestants:
        for concurrency in columns:
            own = _pick(runs, contestant.name, concurrency)
            if own:
                base = _pick(runs, plain, concurrency)
                cells.append(_summarise_cell(contestant, own, base, min_equal=min_equal))
    return cells


def judge_columns(cells: Sequence[Cell], runs: Sequence[CellRun]) -> list[Column]:
    """The fastest admissible contestant of each concurrency."""
    found = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        here = [cell for cell in cells if cell.concurrency == concurrency]
        ranked = sorted(
            (cell for cell in here if cell.tokens_per_s and not cell.excluded),
            key=lambda cell: -(cell.tokens_per_s.value if cell.tokens_per_s else 0.0),
        )
        lead = None
        if len(ranked) > 1:
            lead = paired_ratio(runs, ranked[0].contestant, ranked[1].contestant, concurrency)
        losses = tuple(cell.contestant for cell in here if is_loss(cell))
        winner = ranked[0].contestant if ranked else ""
        found.append(Column(concurrency, winner, bool(lead and lead.is_above_one), losses))
    return found


def is_loss(cell: Cell) -> bool:
    """Measured to its end, and slower than plain decoding; the interval may leave a doubt."""
    return cell.speed_up is not None and cell.speed_up.value < 1 and not cell.excluded


def paired_ratio(
    runs: Sequence[CellRun], ours: str, theirs: str, concurrency: int
) -> Estimate | None:
    """How many times as fast ``ours`` is, over the rounds in which both were measured."""
    return _ratio(_pick(runs, ours, concurrency), _pick(runs, theirs, concurrency))


def _pick(runs: Sequence[CellRun], name: str, concurrency: int) -> list[CellRun]:
    return [run for run in runs if run.contestant == name and run.concurrency == concurrency]


def _ratio(ours: Sequence[CellRun], theirs: Sequence[CellRun]) -> Estimate | None:
    there = {run.round: run.tokens_per_s for run in theirs if run.num_tokens}
    pairs = [
        (run.tokens_per_s, there[run.round])
        for run in ours
        if run.round in there and run.num_tokens
    ]
    return ratio_of([a for a, _ in pairs], [b for _, b in pairs])


def _summarise_cell(
    contestant: Contestant, runs: Sequence[CellRun], base: Sequence[CellRun], *, min_equal: float
) -> Cell:
    answers = [answer for run in runs for answer in run.answered]
    num_failed = sum(run.num_failed for run in runs)
    counts, reason = _counts(runs)
    equal = _equal_texts(contestant, runs, base)
    errors = [run.error for run in runs if run.error]
    excluded = ""
    if errors:
        excluded = errors[0]
    elif num_failed:
        excluded = f"{num_failed} requests failed"
    elif not contestant.is_plain and equal is not None and equal < min_equal:
        excluded = (
            f"{equal:.0%} of its texts are those of plain decoding, bench.min_equal={min_equal:g}"
        )
    return Cell(
        contestant=contestant.name,
        head=contestant.head,
        k=contestant.k,
        concurrency=runs[0].concurrency,
        rounds=len(runs),
        tokens_per_s=mean_of([run.tokens_per_s for run in runs if run.num_tokens]),
        itl=spread(gap for answer in answers for gap in answer.gaps),
        ttft=spread(answer.ttft for answer in answers),
        per_token=spread(a.per_token for a in answers if a.per_token is not None),
        num_requests=sum(len(run.answers) for run in runs),
        num_failed=num_failed,
        tau=tau_of(counts) if counts else None,
        acceptance=acceptance_of(counts) if counts else (),
        no_tau=reason,
        speed_up=None if contestant.is_plain else _ratio(runs, base),
        equal_texts=equal,
        excluded=excluded,
    )


def _counts(runs: Sequence[CellRun]) -> tuple[DraftCounts | None, str]:
    known = [run.counts for run in runs if run.counts is not None]
    if not known:
        return None, next((run.no_counts for run in runs if run.no_counts), "not counted")
    total = sum(known[1:], known[0])
    return (total, "") if total.drafts else (None, "no drafts were counted")


def _equal_texts(
    contestant: Contestant, runs: Sequence[CellRun], base: Sequence[CellRun]
) -> float | None:
    """Against plain decoding of the same round; plain decoding against its next round."""
    ordered = sorted(base, key=lambda run: run.round)
    by_round = {run.round: run for run in ordered}
    if contestant.is_plain:
        pairs = list(itertools.pairwise(ordered))
    else:
        pairs = [(run, by_round[run.round]) for run in runs if run.round in by_round]
    shares = [equal_share(a.answered, b.answered) for a, b in pairs]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None

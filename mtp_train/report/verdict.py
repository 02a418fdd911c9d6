"""Ship or not, and why. Every reason is one sentence that names its figure.

*No* when something speaks against: a failed rung, a head that is not the measured one, or a
speed-up whose interval does not clear 1 anywhere. *Not yet* when something that has to be known is
not: a rung or the speed not measured, too few drafts, no serving engine compared. Else *yes*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp_train.report import formats
from mtp_train.report.facts import Acceptance, Parity, RunFacts, Rung, Speed

Answer = Literal["yes", "not yet", "no"]
Kind = Literal["against", "open", "for", "note"]


@dataclass(frozen=True)
class Reason:
    """One sentence. Only ``against`` and ``open`` decide."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Verdict:
    """``title``: the answer in a few words; ``sentence``: the run in one, to be quoted."""

    answer: Answer
    title: str
    sentence: str
    reasons: tuple[Reason, ...]


def judge(facts: RunFacts) -> Verdict:
    reasons = tuple(
        reason
        for part in (_about_rungs, _about_speed, _about_acceptance, _about_lengths)
        for reason in part(facts)
    )
    kinds = {reason.kind for reason in reasons}
    order: Sequence[Kind] = ("against", "open", "for", "note")
    answer: Answer = "no" if "against" in kinds else "not yet" if "open" in kinds else "yes"
    return Verdict(
        answer=answer,
        title=_title(answer, facts),
        sentence=_sentence(facts),
        reasons=tuple(sorted(reasons, key=lambda reason: order.index(reason.kind))),
    )


def best_speed(parity: Parity, *, batch_size: int | None = None) -> Speed | None:
    """The cell whose interval starts highest, of one batch size or of all; cells of prompts as they
    are only.
    """
    cells = [
        cell
        for cell in measured_cells(parity)
        if not cell.context_len and batch_size in (None, cell.batch_size)
    ]
    return max(cells, key=_low, default=None)


def measured_cells(parity: Parity) -> list[Speed]:
    return [cell for cell in parity.speed if math.isfinite(cell.speedup.value)]


def main_acceptance(parity: Parity, *, k: int | None = None) -> Acceptance | None:
    """The first prompt set's greedy row: at ``k``, else at the largest K that was measured."""
    greedy = [row for row in parity.acceptance if row.temperature == 0] or list(parity.acceptance)
    rows = [row for row in greedy if row.prompt_set == greedy[0].prompt_set]
    wanted = [row for row in rows if row.k == k]
    return max(wanted or rows, key=lambda row: row.k, default=None)


def _about_rungs(facts: RunFacts) -> Iterator[Reason]:
    parity = facts.parity
    if parity.is_stale:
        yield Reason(
            "against",
            "The head in this run is not the one that was measured; validate it again.",
        )
    if parity.draft_vocab is not None:
        yield Reason(
            "against",
            f"The head drafts from {formats.count(parity.draft_vocab.size)} ids only; it can be "
            f"served by: {parity.draft_vocab.served_by}. Exported without the list it has other "
            "figures, which have to be measured.",
        )
    for rung in parity.rungs:
        if rung.passed is False:
            yield Reason("against", f"{rung.name} failed: {_said(rung)}")
    missing = [rung.name for rung in parity.rungs if rung.passed is None and rung.name != "P6"]
    if missing:
        yield Reason("open", f"{_join(missing)} {'was' if len(missing) == 1 else 'were'} not run.")
    if any(rung.name == "P6" and rung.passed is None for rung in parity.rungs):
        yield Reason("open", "P6 was not run: no serving engine has been compared with ours.")
    passed = [rung.name for rung in parity.rungs if rung.passed]
    if passed and not any(rung.passed is False for rung in parity.rungs):
        yield Reason("for", f"{_join(passed)} passed.")
    if not parity.is_finished and passed:
        yield Reason("open", "The ladder has not been climbed to its end.")
    if parity.prediction and parity.prediction.undecided:
        positions = _join([str(j) for j in parity.prediction.undecided])
        yield Reason("note", f"P3 is undecided at position {positions}: too few drafts get there.")


def _about_speed(facts: RunFacts) -> Iterator[Reason]:
    best = best_speed(facts.parity)
    if best is None:
        yield Reason("open", "The speed-up was not measured.")
        return
    where = f"batch {best.batch_size} with K = {best.k}"
    shown = f"{formats.times(best.speedup.value)} {formats.speedup_interval(best.speedup)}"
    if _low(best) > 1:
        yield Reason(
            "for",
            f"Faster than plain decoding at {where}: {shown}, "
            f"{formats.level(best.speedup)} interval.",
        )
        slow = [str(size) for size in _sizes(facts.parity) if not _wins(facts.parity, size)]
        if slow:
            yield Reason("note", f"Not shown to be faster at batch {_join(slow)}, with any K.")
        others = [
            f"K = {cell.k} at batch {cell.batch_size}"
            for size in _sizes(facts.parity)
            if (cell := best_speed(facts.parity, batch_size=size)) and cell.k != best.k
        ]
        if others:
            yield Reason("note", f"The best K differs by batch size: {_join(others)}.")
    elif not best.speedup.has_interval:
        yield Reason("open", f"The speed-up at {where} has no interval: {shown}.")
    else:
        word = "Slower than plain decoding" if best.speedup.value < 1 else "Not shown to be faster"
        yield Reason(
            "against",
            f"{word}: even at its best, {where}, the speed-up is {shown}; the lower end of the "
            f"{formats.level(best.speedup)} interval has to be above 1.",
        )


def _about_acceptance(facts: RunFacts) -> Iterator[Reason]:
    row = main_acceptance(facts.parity)
    if row is None:
        yield Reason("open", "Acceptance was not measured.")
    elif row.num_drafts < facts.min_drafts:
        yield Reason(
            "open",
            f"Only {row.num_drafts:,} drafts were measured on {formats.set_name(row.prompt_set)}; "
            f"{facts.min_drafts:,} are asked for.",
        )


def _about_lengths(facts: RunFacts) -> Iterator[Reason]:
    trained, measured = facts.parity.trained_len, facts.parity.measured_len
    if trained is None or measured is None:
        return
    known = max(trained, measured)
    yield Reason(
        "note",
        f"Trained on samples of up to {trained:,} tokens, measured behind up to {measured:,}; how "
        f"it drafts beyond {known:,} is unknown.",
    )


def _title(answer: Answer, facts: RunFacts) -> str:
    if answer == "no":
        return "Do not ship"
    if answer == "not yet":
        return "Not proven yet"
    best = best_speed(facts.parity)
    assert best is not None, "a head whose speed is unknown is not shipped"
    sizes = [size for size in _sizes(facts.parity) if _wins(facts.parity, size, k=best.k)]
    upto = f", up to batch {max(sizes)}" if len(sizes) > 1 else f", at batch {sizes[0]}"
    return f"Ship, with K = {best.k}{upto}"


def _sentence(facts: RunFacts) -> str:
    """What a busy person can pass on."""
    best = best_speed(facts.parity)
    row = main_acceptance(facts.parity, k=best.k if best else None)
    target = facts.target or "the target"
    parts = []
    if best is not None:
        digits = formats.speedup_digits(best.speedup)
        pace = formats.times(best.speedup.value)
        parts.append(
            f"Drafting {best.k} token{'s' * (best.k > 1)} ahead, {target} decodes {pace} as fast "
            f"as without at batch {best.batch_size} ({formats.level(best.speedup)} interval "
            f"{formats.decimal(best.speedup.low, digits)} to "
            f"{formats.decimal(best.speedup.high, digits)})"
        )
    if row is not None:
        mode = "greedy" if not row.temperature else f"T = {row.temperature:g}"
        parts.append(
            f"{formats.decimal(row.tau.value, 2)} tokens per step on "
            f"{formats.set_name(row.prompt_set)}, {mode}, over {row.num_drafts:,} drafts"
        )
    if not parts:
        return f"Nothing has been measured of this draft head for {target} yet."
    return "; ".join(parts) + "."


def _said(rung: Rung) -> str:
    return f"{rung.note or rung.question.lower()}."


def _sizes(parity: Parity) -> list[int]:
    return sorted({cell.batch_size for cell in measured_cells(parity) if not cell.context_len})


def _wins(parity: Parity, batch_size: int, *, k: int | None = None) -> bool:
    """Whether the interval of any cell of that size (and K) lies above 1."""
    return any(
        _low(cell) > 1
        for cell in measured_cells(parity)
        if cell.batch_size == batch_size and not cell.context_len and k in (None, cell.k)
    )


def _low(cell: Speed) -> float:
    return cell.speedup.low if cell.speedup.low is not None else -math.inf


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

"""What is in a token set: counts, lengths, scripts, rejects; and a coloured preview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from data_prep.conversation import BEYOND_LIMITS, Reject
from data_prep.coverage import CoverageCounter, Origin, Part, largest_parts
from data_prep.scripts import script_shares
from data_prep.token_set import TokenRow

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

    from data_prep.chat import ChatFormat

_SCRIPT_SAMPLE_ROWS = 2000
_COVERAGE: Mapping[str, str] = MappingProxyType(
    {"domains": "source and domain", "prompt_scripts": "script of the prompt"}
)
_SHOWN_PARTS = 12
_SHADES = ("black on green3", "black on green1")


@dataclass(frozen=True)
class Lengths:
    """Percentiles in tokens (nearest rank)."""

    p50: int = 0
    p90: int = 0
    p99: int = 0
    max: int = 0


@dataclass(frozen=True)
class SplitStatistics:
    """One split. Lengths: whole rows, prompts (up to the first answer), single answers."""

    num_rows: int
    num_conversations: int
    num_tokens: int
    num_masked_tokens: int  # under the loss mask
    num_cut_off: int
    row_lens: Lengths
    prompt_lens: Lengths
    answer_lens: Lengths
    sources: Mapping[str, int]  # rows per source
    scripts: Mapping[str, float]  # share of the letters under the mask, by Unicode script
    domains: Mapping[str, Part] = field(default_factory=dict)  # by source and what a record says
    prompt_scripts: Mapping[str, Part] = field(default_factory=dict)  # by main script of the prompt

    @property
    def masked_share(self) -> float:
        """Share of the tokens that the assistant generated."""
        return self.num_masked_tokens / self.num_tokens if self.num_tokens else 0.0


class StatisticsCounter:
    """Counts rows one by one, so that they need not stay in memory."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._row_lens: list[int] = []
        self._prompt_lens: list[int] = []
        self._answer_lens: list[int] = []
        self._num_cut_off = 0
        self._sources: Counter[str] = Counter()
        self._conversations: set[str] = set()
        self._characters: Counter[str] = Counter()
        self._coverage = CoverageCounter()

    def add(self, row: TokenRow, origin: Origin) -> None:
        self._row_lens.append(len(row.input_ids))
        spans = mask_spans(row.loss_mask)
        self._prompt_lens.append(spans[0][0] if spans else len(row.input_ids))
        self._answer_lens.extend(end - start for start, end in spans)
        self._coverage.add(origin, sum(end - start for start, end in spans))
        self._num_cut_off += row.cut_off
        self._sources[row.source] += 1
        self._conversations.add(row.conversation_id)
        if len(self._row_lens) <= _SCRIPT_SAMPLE_ROWS:
            for start, end in spans:
                self._characters.update(self._chat.decode(row.input_ids[start:end]))

    def result(self) -> SplitStatistics:
        return SplitStatistics(
            num_rows=len(self._row_lens),
            num_conversations=len(self._conversations),
            num_tokens=sum(self._row_lens),
            num_masked_tokens=sum(self._answer_lens),
            num_cut_off=self._num_cut_off,
            row_lens=_percentiles(self._row_lens),
            prompt_lens=_percentiles(self._prompt_lens),
            answer_lens=_percentiles(self._answer_lens),
            sources=dict(self._sources.most_common()),
            scripts=script_shares(self._characters),
            domains=largest_parts(self._coverage.domains),
            prompt_scripts=largest_parts(self._coverage.prompt_scripts),
        )


def mask_spans(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """``(start, end)`` of each run of true entries."""
    spans: list[tuple[int, int]] = []
    start = -1
    for index, flag in enumerate(loss_mask):
        if flag and start < 0:
            start = index
        elif not flag and start >= 0:
            spans.append((start, index))
            start = -1
    if start >= 0:
        spans.append((start, len(loss_mask)))
    return spans


def reject_counts(rejects: Iterable[Reject]) -> dict[str, int]:
    """Number of rejects per reason, largest first."""
    return dict(Counter(reject.reason for reject in rejects).most_common())


def preview(rows: Iterable[TokenRow], chat: ChatFormat, *, max_tokens: int = 200) -> RenderableType:
    """Rows as text: tokens under the mask on green (two shades, one per token), the rest dim.

    Shows the end of each prompt and the start of its answer, ``max_tokens`` in all per row.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    panels = []
    for row in rows:
        first = row.loss_mask.index(True) if any(row.loss_mask) else 0
        start = max(0, min(first - max_tokens // 2, len(row.input_ids) - max_tokens))
        end = min(len(row.input_ids), start + max_tokens)
        text = Text("… " if start else "", style="dim")
        shade = 0
        for piece, flag in _pieces(row, chat, start, end):
            shade = 1 - shade
            # A token that is only a line break would be invisible.
            shown = piece.replace("\n", "⏎\n") if flag else piece
            text.append(shown, style=_SHADES[shade] if flag else "dim")
        if end < len(row.input_ids):
            text.append(" …", style="dim")
        masked = sum(row.loss_mask)
        title = f"{row.source} · {len(row.input_ids)} tokens, {masked} generated"
        panels.append(Panel(text, title=title + (" · cut off" if row.cut_off else "")))
    return Group(*panels)


def statistics_tables(
    splits: Mapping[str, SplitStatistics], rejects: Mapping[str, int]
) -> RenderableType:
    """The figures of both splits, the reasons of rejection, and what was not needed, as tables."""
    from rich.columns import Columns
    from rich.table import Table

    table = Table("", *splits, title="token set")

    def add(name: str, values: Iterable[str]) -> None:
        table.add_row(name, *values)

    stats = list(splits.values())
    add("conversations", (f"{item.num_conversations:,}" for item in stats))
    add("rows", (f"{item.num_rows:,}" for item in stats))
    add("tokens", (f"{item.num_tokens:,}" for item in stats))
    add("under the mask", (f"{item.masked_share:.1%}" for item in stats))
    add("cut off", (f"{item.num_cut_off:,}" for item in stats))
    for name in ("row", "prompt", "answer"):
        lens = [getattr(item, f"{name}_lens") for item in stats]
        add(
            f"{name} length p50 / p90 / p99",
            (f"{item.p50} / {item.p90} / {item.p99}" for item in lens),
        )
    add("scripts", (_format_shares(item.scripts) for item in stats))
    coverage = [_coverage_table(kind, stats[0]) for kind in _COVERAGE] if stats else []
    faults = Table("not used", "count", title="rejects")
    beyond = Table("not needed", "count", title="beyond the limits")
    for reason, count in rejects.items():
        (beyond if reason in BEYOND_LIMITS else faults).add_row(reason, f"{count:,}")
    return Columns([table, *(part for part in (*coverage, faults, beyond) if part.rows)])


def _coverage_table(kind: str, split: SplitStatistics) -> RichTable:
    """Shares of the first split (training) by one kind of part."""
    from rich.table import Table

    parts: Mapping[str, Part] = getattr(split, kind)
    table = Table(_COVERAGE[kind], "rows", "answer tokens", title="coverage of training")
    for label, part in list(parts.items())[:_SHOWN_PARTS]:
        rows = part.num_rows / split.num_rows if split.num_rows else 0.0
        tokens = part.num_answer_tokens / (split.num_masked_tokens or 1)
        table.add_row(label, f"{rows:.1%}", f"{tokens:.1%}")
    return table


def _pieces(row: TokenRow, chat: ChatFormat, start: int, end: int) -> list[tuple[str, bool]]:
    """Text and mask flag per token; tokens that hold half a character are shown together."""
    pieces: list[tuple[str, bool]] = []
    pending: list[int] = []
    for index in range(start, end):
        pending.append(row.input_ids[index])
        text = chat.decode(pending)
        flag = row.loss_mask[index]
        is_last = index + 1 == end or row.loss_mask[index + 1] != flag
        if not text.endswith("\ufffd") or is_last:
            pieces.append((text, flag))
            pending = []
    return pieces


def _percentiles(values: list[int]) -> Lengths:
    if not values:
        return Lengths()
    ordered = sorted(values)

    def rank(share: float) -> int:
        return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]

    return Lengths(rank(0.5), rank(0.9), rank(0.99), ordered[-1])


def _format_shares(shares: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{script} {share:.1%}" for script, share in shares.items() if share >= 0.001)
        or "-"
    )

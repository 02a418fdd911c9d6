"""What `mtp bench` measures: contestants, single requests, cells.

A *cell* is one contestant at one concurrency; it is measured once per round. Times are in seconds.
A chunk is what arrives at once: with speculation several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtp_train.serving.job import DraftCounts

NONE = "none"  # plain decoding, what heads are compared with


@dataclass(frozen=True)
class Contestant:
    """One server that is measured: a head at one K, or none. ``directory`` is set where the server
    is started here, ``url`` where it runs already; ``k=None``: a server that does not say.
    """

    head: str
    k: int | None
    directory: Path | None = None
    url: str = ""

    @property
    def name(self) -> str:
        if self.head == NONE or self.k in (None, 0):
            return self.head
        return f"{self.head} K={self.k}"

    @property
    def is_plain(self) -> bool:
        return self.head == NONE


@dataclass(frozen=True)
class Question:
    """One prompt, as messages of the chat format."""

    id: str
    messages: tuple[tuple[str, str], ...] = field(repr=False)  # role, content

    @property
    def text(self) -> str:
        return "\n".join(content for _, content in self.messages)


@dataclass(frozen=True)
class Answer:
    """One request. ``arrivals``: of each chunk, since it was sent. ``error``: it failed."""

    question: int
    text: str = field(repr=False)
    arrivals: tuple[float, ...] = field(repr=False)
    num_tokens: int
    finish_reason: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def gaps(self) -> tuple[float, ...]:
        """Between neighbouring chunks: the inter-token latency that a reader sees."""
        return tuple(b - a for a, b in zip(self.arrivals[:-1], self.arrivals[1:], strict=True))

    @property
    def per_token(self) -> float | None:
        """Seconds per token behind the first one."""
        if self.num_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)


@dataclass(frozen=True)
class CellRun:
    """A cell in one round. ``counts`` are the server's own; ``None`` for the reason ``no_counts``.
    ``error``: it was not measured to its end.
    """

    contestant: str
    concurrency: int
    round: int
    wall_s: float
    answers: tuple[Answer, ...] = field(repr=False)
    counts: DraftCounts | None = None
    no_counts: str = ""
    error: str = ""

    @property
    def answered(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if not answer.error)

    @property
    def num_failed(self) -> int:
        return len(self.answers) - len(self.answered)

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answered)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class Estimate:
    """A mean over rounds with its 95 % interval; ``None`` where there was one round."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_one(self) -> bool:
        return self.low is not None and self.low > 1

    @property
    def is_below_one(self) -> bool:
        return self.high is not None and self.high < 1


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of what was pooled over rounds."""

    p50: float
    p95: float


@dataclass(frozen=True)
class Cell:
    """One contestant at one concurrency, over all rounds that were measured.

    ``tau``: tokens per verification step. ``acceptance``: share of drafts that got past each
    position. ``speed_up`` is paired by round with plain decoding at the same concurrency;
    ``equal_texts`` the share of its answers that are, letter by letter, those of plain decoding
    (of plain decoding: those of its other rounds). ``excluded``: why it cannot win.
    """

    contestant: str
    head: str
    k: int | None
    concurrency: int
    rounds: int
    tokens_per_s: Estimate | None
    itl: Spread | None
    ttft: Spread | None
    per_token: Spread | None
    num_requests: int
    num_failed: int
    tau: float | None
    acceptance: tuple[float, ...]
    no_tau: str
    speed_up: Estimate | None
    equal_texts: float | None
    excluded: str = ""


@dataclass(frozen=True)
class Column:
    """The cells of one concurrency. ``is_clear``: the winner's lead over the next is beyond its
    interval. ``losses``: contestants that are slower than plain decoding.
    """

    concurrency: int
    winner: str
    is_clear: bool
    losses: tuple[str, ...]

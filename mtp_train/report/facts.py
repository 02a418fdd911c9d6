"""What the report shows, as plain records. ``None`` and empty tuples mean "not measured".

Filled by ``parity.py`` (the ladder's figures), ``logbook.py`` (``events.jsonl``), ``stores.py``
(data, features, versions, exports) and ``samples.py`` (texts); judged by ``verdict.py``; drawn by
``page.py``.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """A measured value and its interval, where one was measured. ``level``: 0.95 for 95 %."""

    value: float
    low: float | None = None
    high: float | None = None
    level: float = 0.95

    @property
    def has_interval(self) -> bool:
        return self.low is not None and self.high is not None


@dataclass(frozen=True)
class RungFigure:
    """One figure of a rung and the bound it was held against, both as the ladder wrote them."""

    name: str
    value: object
    bound: object = None


@dataclass(frozen=True)
class Rung:
    """``passed`` is ``None`` for a rung that was not climbed."""

    name: str
    question: str
    passed: bool | None = None
    note: str = ""
    seconds: float | None = None
    figures: tuple[RungFigure, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Acceptance:
    """Pooled acceptance over one prompt set. ``rates[j]``: drafts accepted past position j + 1."""

    prompt_set: str
    k: int
    temperature: float
    draft_mode: str
    num_drafts: int
    num_prompts: int
    max_tokens: int
    tau: Figure
    rates: tuple[Figure, ...]
    conditional_rates: tuple[float, ...]


@dataclass(frozen=True)
class Prediction:
    """Rung P3: what the training forward predicts beside what the runtime did on the same output.

    Conditional rates per position; ``undecided`` holds positions (from 1) with too few drafts.
    """

    dtype: str
    prompt_set: str
    k: int
    num_drafts: int
    num_prompts: int
    predicted_tau: Figure
    measured_tau: Figure
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    gaps: tuple[Figure, ...]
    undecided: tuple[int, ...]


@dataclass(frozen=True)
class Served:
    """Rung P6: acceptance in the user's serving engine, by its own counters, beside the runtime's
    over the same prompts. Greedy, arg-max drafts.
    """

    engine: str  # with its version
    prompt_set: str
    dtype: str
    k: int
    num_drafts: int
    num_prompts: int
    tau: Figure
    rates: tuple[float, ...]
    tau_here: float | None  # the runtime's, over the same prompts


@dataclass(frozen=True)
class DecodeSpeed:
    """How one batch decodes: tokens/s over the batch, milliseconds."""

    tokens_per_s: float | None = None
    inter_token_p50_ms: float | None = None
    inter_token_p99_ms: float | None = None
    first_token_ms: float | None = None


@dataclass(frozen=True)
class Speed:
    """One cell of the speed measurement: with the draft against without."""

    prompt_set: str
    batch_size: int
    context_len: int  # tokens of every prompt; 0: the prompts as they are
    k: int
    speedup: Figure
    predicted: float | None = None
    emitted_per_step: float | None = None
    draft_cost: float | None = None  # c of the cost model, in plain steps
    verify_cost: float | None = None  # v
    draft: DecodeSpeed = DecodeSpeed()
    plain: DecodeSpeed = DecodeSpeed()
    num_groups: int | None = None  # batches of requests
    num_repeats: int | None = None  # runs of each


@dataclass(frozen=True)
class Breakdown:
    """Acceptance over the drafts of one label of one dimension."""

    dimension: str
    label: str
    prompt_set: str
    k: int
    temperature: float
    num_drafts: int
    num_prompts: int
    tau: Figure
    rates: tuple[float, ...]


@dataclass(frozen=True)
class DraftVocabulary:
    """The list of ids that the measured head drafts from, and the engines that could serve it."""

    size: int
    served_by: str


@dataclass(frozen=True)
class Parity:
    """``parity.json``. ``is_stale``: the run's head is not the one that was measured."""

    is_finished: bool = False
    is_stale: bool = False
    target: str = ""  # fingerprint
    rungs: tuple[Rung, ...] = ()
    acceptance: tuple[Acceptance, ...] = ()
    prediction: Prediction | None = None
    served: tuple[Served, ...] = ()
    speed: tuple[Speed, ...] = ()
    breakdown: tuple[Breakdown, ...] = ()
    target_kv_bytes: int | None = None  # per token
    draft_kv_bytes: int | None = None
    draft_vocab: DraftVocabulary | None = None  # none: the whole vocabulary
    trained_len: int | None = None  # tokens of the longest trained sample
    measured_len: int | None = None  # before the furthest draft that was measured


@dataclass(frozen=True)
class StepPoint:
    """One optimiser step; losses are means over active positions."""

    step: int
    loss: float
    tokens_per_s: float | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class ValidationPoint:
    """One validation during training, on the training data's validation split."""

    step: int
    loss: float | None
    tau: float
    rates: tuple[float, ...]
    num_drafts: int | None
    num_prompts: int | None
    is_best: bool


@dataclass(frozen=True)
class Stage:
    """Wall time of one stage over all its attempts."""

    name: str
    seconds: float
    num_attempts: int
    is_finished: bool
    world_size: int | None


@dataclass(frozen=True)
class Happening:
    """Something out of the ordinary: a skipped step, a quarantine, a restart."""

    time: datetime.datetime | None
    stage: str
    what: str


@dataclass(frozen=True)
class Logbook:
    """What ``events.jsonl`` tells."""

    steps: tuple[StepPoint, ...] = field(default=(), repr=False)
    validations: tuple[ValidationPoint, ...] = ()
    num_skipped: int = 0
    distinct_tokens: int | None = None  # that training sees, each counted once
    stages: tuple[Stage, ...] = ()
    happenings: tuple[Happening, ...] = ()


@dataclass(frozen=True)
class TokenSplit:
    """One split of the token set."""

    name: str
    num_rows: int
    num_tokens: int
    num_masked_tokens: int
    num_cut_off: int
    median_len: int | None
    max_len: int | None


@dataclass(frozen=True)
class CoveragePart:
    """One domain (``kind`` "domains") or script ("prompt_scripts") of the training split: its
    shares of rows and of answer tokens.
    """

    kind: str
    label: str
    row_share: float
    token_share: float


@dataclass(frozen=True)
class FeatureStore:
    """One split's feature store. ``codec_kl``: worst mean KL of a shard through the codec, nats."""

    split: str
    codec: str
    hidden_size: int
    num_samples: int
    num_tokens: int
    num_bytes: int
    num_shards: int
    num_quarantined: int
    codec_kl: float | None


@dataclass(frozen=True)
class Export:
    """One directory of ``export/``. ``commands``: (engine, command line)."""

    name: str
    format: str
    num_tensors: int | None
    commands: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Package:
    """An installed package; several versions when stages ran with different ones."""

    name: str
    versions: tuple[str, ...]


@dataclass(frozen=True)
class Stores:
    """Data, features, exports and what the run was made with."""

    splits: tuple[TokenSplit, ...] = ()
    rejects: tuple[tuple[str, int], ...] = ()
    beyond_limits: tuple[tuple[str, int], ...] = ()  # rows that were not needed, by reason
    coverage: tuple[CoveragePart, ...] = ()
    features: tuple[FeatureStore, ...] = ()
    exports: tuple[Export, ...] = ()
    packages: tuple[Package, ...] = ()
    machines: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Token:
    """``position`` from 1 of an accepted draft; 0: written by the target."""

    text: str
    position: int


@dataclass(frozen=True)
class Sample:
    """One generated answer."""

    prompt_set: str
    category: str
    prompt: str
    tau: float | None
    tokens: tuple[Token, ...] = field(repr=False)


@dataclass(frozen=True)
class TrainingRow:
    """One row of the token set; ``tokens`` are (text, counts in the loss)."""

    sample_id: str
    tokens: tuple[tuple[str, bool], ...] = field(repr=False)


@dataclass(frozen=True)
class Texts:
    """Customer text. Empty when it is not to be shown."""

    k: int = 0
    samples: tuple[Sample, ...] = ()
    training_row: TrainingRow | None = None


@dataclass(frozen=True)
class RunFacts:
    """Everything that the report of one run is made of."""

    name: str
    target: str  # its name, without the path
    min_drafts: int
    parity: Parity
    logbook: Logbook
    stores: Stores
    texts: Texts

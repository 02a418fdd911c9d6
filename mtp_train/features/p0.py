"""P0, the first rung of the parity ladder: is the stored state the state the runtime feeds?

Measured on a sample of every shard while dumping, before anything is written:

- before the codec, ``lm_head(g)`` of the dump against the runtime's *decode path* (one row per
  step through the K/V cache) and against Hugging Face in fp32;
- after the codec, the mean KL that storing costs, over rows spread over the whole shard.

In fp32 the log-probability of each taken token may differ by ``max_logprob_gap``. In lower
precision two correct paths differ by rounding, so there the mean KL against each reference is
bounded by ``max_kl`` and the mean gap between dump and decode path by twice the decode path's own
error against fp32 (two independent roundings of equal size give a ratio of sqrt 2).

Shape legend: M rows of a window, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.config import Codec
from mtp_train.errors import StageRefusedError
from mtp_train.features.codecs import decode, encode
from mtp_train.features.manifest import Comparison, LayerComparison, P0Figures
from mtp_train.features.p0_layers import compare_layers, layer_failures
from mtp_train.features.shards import FeatureSample
from mtp_train.features.sources import FeatureSource, HuggingFaceSource
from runtime.batch import BatchMode, build_batch, upload_ids
from runtime.kv_cache import SlotTable
from runtime.models.base import Model
from runtime.team import Team

logger = logging.getLogger(__name__)

_PAGE_SIZE = 16
_ERROR_FACTOR = 2.0
_CODEC_ROWS = 256  # spread over the whole shard: neighbouring rows have similar errors

DECODE, HUGGINGFACE, DECODE_ERROR = "decode", "huggingface", "decode_error"


class P0Error(StageRefusedError):
    """The dumped states are not what the runtime feeds, or the codec costs too much."""


@dataclass(frozen=True)
class Window:
    """The last rows of one sequence, or of a prefix of it: row ``i`` in ``start .. T-2`` predicts
    token ``i + 1``.
    """

    token_ids: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return len(self.token_ids) - 1

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class LogitsReference(ABC):
    """An independent way to the distributions that the dumped states stand for."""

    name: str

    @abstractmethod
    def logits(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """fp32 ``[M, V]`` per window, host memory."""


class DecodeReference(LogitsReference):
    """The runtime's decode path: the prefix is prefilled, the window decoded row by row.

    Each sequence is decoded alone. A batch of one row takes other kernels than two or more rows
    do, which may agree with the dump bit by bit and so show nothing.
    """

    name = DECODE

    def __init__(self, team: Team) -> None:
        self._team = team

    def logits(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        logits: list[torch.Tensor] = self._team.call(_decode_windows, tuple(windows))
        return logits


@torch.inference_mode()
def _decode_windows(model: Model, windows: Sequence[Window]) -> list[torch.Tensor]:
    return [_decode_window(model, window) for window in windows]


def _decode_window(model: Model, window: Window) -> torch.Tensor:
    length = len(window.token_ids)
    num_pages = -(-length // _PAGE_SIZE)
    table = SlotTable(num_rows=1, max_len=length, page_size=_PAGE_SIZE, num_pages=num_pages)
    pool = model.new_pool(num_pages * _PAGE_SIZE)
    row = table.acquire_row()
    table.reserve(row, length)

    def forward(mode: BatchMode, start: int, stop: int) -> torch.Tensor:
        batch = build_batch(
            mode,
            table=table,
            table_rows=[row],
            starts=[start],
            q_lens=[stop - start],
            input_ids_N=upload_ids(window.token_ids[start:stop], model.device),
            device=model.device,
        )
        return model.forward(batch, table, pool)

    if window.start:
        forward(BatchMode.PREFILL, 0, window.start)
    positions = range(window.start, length - 1)
    rows = [model.logits(forward(BatchMode.DECODE, i, i + 1)).float().cpu() for i in positions]
    return torch.cat(rows)


class HuggingFaceReference(LogitsReference):
    """Hugging Face in fp32, one forward per sequence."""

    name = HUGGINGFACE

    def __init__(self, source: HuggingFaceSource) -> None:
        self.source = source

    def logits(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        logits: list[torch.Tensor] = []
        for window in windows:
            (rows,) = self.source.hidden([window.token_ids])
            logits.append(self.source.logits(rows.hidden_TD[window.start : -1]).cpu())
        return logits


class P0Check:
    """Measures P0 on the samples of one shard; raises :class:`P0Error` when out of bound."""

    def __init__(
        self,
        source: FeatureSource,
        references: Sequence[LogitsReference],
        *,
        codec: Codec,
        num_samples: int,
        num_rows: int,
        max_logprob_gap: float,
        max_kl: float,
        layer_ids: Sequence[int] = (),
        num_first_rows: int = 0,
    ) -> None:
        """``num_first_rows`` of each sample are compared beside its last ones.

        ``layer_ids`` of the samples' residual streams, which only a Hugging Face reference sees
        (:mod:`mtp_train.features.p0_layers`); without one that is logged.
        """
        self._source = source
        self._references = references
        self._codec: Codec = codec
        self._num_samples = num_samples
        self._num_rows = num_rows
        self._max_logprob_gap = max_logprob_gap
        self._max_kl = max_kl
        self._layer_ids = tuple(layer_ids)
        self._num_first_rows = num_first_rows
        if self._layer_ids and self._find_hugging_face() is None:
            logger.warning(
                "P0: residual streams %s are not compared with anything, features.p0_references "
                "has no huggingface",
                list(self._layer_ids),
            )

    def __call__(self, samples: Sequence[FeatureSample]) -> P0Figures:
        figures = self.measure(samples)
        failures = self.failures(figures)
        if failures:
            raise P0Error(
                "P0: the dumped hidden states do not reproduce the target's distribution: "
                f"{'; '.join(failures)}. Nothing of this shard was written"
            )
        return figures

    def measure(self, samples: Sequence[FeatureSample]) -> P0Figures:
        """The figures for a sample of ``samples``, spread evenly over their lengths."""
        sampled = spread_by_length(samples, self._num_samples)
        pairs = [(sample, window) for sample in sampled for window in self._windows(sample)]
        chosen = [sample for sample, _ in pairs]
        windows = [window for _, window in pairs]
        taken_M = _cat([w.token_ids[w.start + 1 :] for w in windows])
        hidden_MD = torch.cat(
            [s.hidden[w.start : w.stop] for s, w in pairs]
            or [torch.empty(0, samples[0].hidden.shape[1], dtype=samples[0].hidden.dtype)]
        )
        ours_MV = self._log_probs(hidden_MD)
        comparisons = []
        if windows:
            theirs = {
                ref.name: torch.cat(ref.logits(windows)).log_softmax(-1) for ref in self._references
            }
            comparisons = [
                _compare(name, ours_MV, theirs_MV, taken_M) for name, theirs_MV in theirs.items()
            ]
            if DECODE in theirs and HUGGINGFACE in theirs:
                comparisons.append(
                    _compare(DECODE_ERROR, theirs[DECODE], theirs[HUGGINGFACE], taken_M)
                )
        return P0Figures(
            num_samples=len(sampled),
            num_rows=len(taken_M),
            dtype=str(hidden_MD.dtype).removeprefix("torch."),
            comparisons=tuple(comparisons),
            codec_mean_kl=self._measure_codec(samples),
            layers=self._compare_layers(chosen, windows),
        )

    def _windows(self, sample: FeatureSample) -> list[Window]:
        """The last rows, and the first ones where they are wanted; no row twice."""
        ids = tuple(sample.input_ids.tolist())
        last = Window(ids, max(0, len(ids) - 1 - self._num_rows))
        count = min(self._num_first_rows, last.start)
        return [Window(ids[: count + 1], 0), last] if count else [last]

    def _find_hugging_face(self) -> HuggingFaceReference | None:
        return next((r for r in self._references if isinstance(r, HuggingFaceReference)), None)

    def _compare_layers(
        self, samples: Sequence[FeatureSample], windows: Sequence[Window]
    ) -> tuple[LayerComparison, ...]:
        reference = self._find_hugging_face()
        if not (self._layer_ids and windows and reference):
            return ()
        rows = []
        for sample, window in zip(samples, windows, strict=True):
            assert sample.layers is not None, "the writer takes no sample without them"
            rows.append(sample.layers[window.start : window.stop].cpu())
        return compare_layers(
            reference.source,
            [window.token_ids for window in windows],
            [window.start for window in windows],
            rows,
            layer_ids=self._layer_ids,
            codec=self._codec,
        )

    def _measure_codec(self, samples: Sequence[FeatureSample]) -> float:
        """Mean KL that the codec costs on rows spread evenly over all of ``samples``."""
        stops = torch.tensor([len(sample.input_ids) for sample in samples]).cumsum(0)
        total = int(stops[-1])
        picks = [i * total // min(total, _CODEC_ROWS) for i in range(min(total, _CODEC_ROWS))]
        owners = torch.searchsorted(stops, torch.tensor(picks), right=True).tolist()
        hidden_MD = torch.stack(
            [
                samples[owner].hidden[pick - int(stops[owner])]  # from the end of the sample
                for owner, pick in zip(owners, picks, strict=True)
            ]
        )
        stored_MD = decode(encode(hidden_MD, self._codec), dtype=hidden_MD.dtype)
        return _mean_kl(self._log_probs(hidden_MD), self._log_probs(stored_MD))

    def failures(self, figures: P0Figures) -> list[str]:
        """What is out of bound, in words; empty when the rung is passed."""
        found = []
        by_name = {comparison.name: comparison for comparison in figures.comparisons}
        error = by_name.get(DECODE_ERROR)
        for name in (DECODE, HUGGINGFACE):
            if name not in by_name:
                continue
            item = by_name[name]
            if figures.dtype == "float32":
                if not item.max_gap <= self._max_logprob_gap:
                    found.append(
                        f"log-probabilities differ from {name} by up to {item.max_gap:.3g} nats, "
                        f"allowed {self._max_logprob_gap:g} (features.p0_max_logprob_gap)"
                    )
                continue
            if not item.mean_kl <= self._max_kl:
                found.append(
                    f"mean KL against {name} is {item.mean_kl:.3g} nats, "
                    f"allowed {self._max_kl:g} (features.p0_max_kl)"
                )
            if name == DECODE and error and not item.mean_gap <= _ERROR_FACTOR * error.mean_gap:
                found.append(
                    f"mean gap to the decode path is {item.mean_gap:.3g} nats, more than "
                    f"{_ERROR_FACTOR:g} times its own {figures.dtype} error {error.mean_gap:.3g}"
                )
        if not figures.codec_mean_kl <= self._max_kl:
            found.append(
                f"codec {self._codec} costs a mean KL of {figures.codec_mean_kl:.3g} nats, "
                f"allowed {self._max_kl:g} (features.p0_max_kl)"
            )
        return found + layer_failures(figures.layers, dtype=figures.dtype, codec=self._codec)

    def _log_probs(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self._source.logits(hidden_MD).cpu().log_softmax(-1)


def spread_by_length(samples: Sequence[FeatureSample], count: int) -> list[FeatureSample]:
    """``count`` samples at evenly spaced quantiles of length, each of at least two tokens."""
    usable = [sample for sample in samples if len(sample.input_ids) > 1]
    usable.sort(key=lambda sample: (len(sample.input_ids), sample.sample_id))
    if len(usable) <= count:
        return usable
    return [usable[(2 * index + 1) * len(usable) // (2 * count)] for index in range(count)]


def _compare(
    name: str, ours_MV: torch.Tensor, theirs_MV: torch.Tensor, taken_M: torch.Tensor
) -> Comparison:
    """Both sides are log-probabilities, fp32."""
    gap_M = (ours_MV.gather(1, taken_M[:, None]) - theirs_MV.gather(1, taken_M[:, None])).abs()
    return Comparison(
        name=name,
        max_gap=float(gap_M.max()),
        mean_gap=float(gap_M.mean()),
        mean_kl=_mean_kl(theirs_MV, ours_MV),
    )


def _mean_kl(reference_MV: torch.Tensor, other_MV: torch.Tensor) -> float:
    """Mean over rows of KL(reference || other), nats; inputs are log-probabilities."""
    terms_MV = reference_MV.exp() * (reference_MV - other_MV)
    return float(terms_MV.sum(-1).mean())


def _cat(parts: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=torch.int64)

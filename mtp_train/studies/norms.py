"""What the norms of a head do: the runs of ``+experiment=norms`` measured on the same prompts.

    python -m mtp_train.studies.norms --out docs/norms.json \\
        --long-set runs/norms-long_prompts/data runs/norms-data=*

MT-Bench is decoded in the runtime, target and head together. Long prompts are those of the long
token set's validation split up to their last answer; a head's drafts for the target's own greedy
answers are replayed (rung P3: the same figure, without the prefill of thousands of rows per head).
Goes on where it stopped: a head that was measured is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from data_prep.evaluation import evaluation_prompts
from data_prep.token_set import load_token_set
from mtp_train.conditioning import RECORD_NAME, Conditioning, open_conditioned
from mtp_train.config import Config, HeadNorms
from mtp_train.events import read_events
from mtp_train.features.target import load_tokenizer
from mtp_train.run_dir import describe_machine, read_json, write_json_atomic
from mtp_train.settings import load_config
from mtp_train.validate.measure import acceptance_sums, decode_waves, make_requests
from mtp_train.validate.subject import Subject, open_subject
from mtp_train.validate.unroll import HiddenSequence, training_drafts
from runtime.cpu import set_threads
from runtime.engine import Engine
from runtime.request import Generation

logger = logging.getLogger(__name__)

K = 1
NORM_NAMES = {
    HeadNorms(): "all",
    HeadNorms(enorm=False, hnorm=False): "no enorm, hnorm",
    HeadNorms(input=False): "no input",
    HeadNorms(final=False): "no final",
    HeadNorms(enorm=False, hnorm=False, input=False, final=False): "none (EAGLE)",
}


@dataclass(frozen=True)
class Settings:
    """What every head is measured on, greedy, one drafted token per step."""

    mtbench_prompts: int = 16
    long_prompts: int = 8
    max_tokens: int = 64


@dataclass(frozen=True)
class Counts:
    """Per prompt: verification steps, and how many accepted their draft."""

    drafts: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class RunFigures:
    """One trained head. ``losses``: soft cross-entropy of every step, of text not seen before."""

    name: str
    head: str
    init: str
    prompts: str
    scale: float
    num_outliers: int
    outlier_scale: float
    seed: int
    learning_rate: float
    num_tokens: int
    num_active: int
    skipped: int
    train_s: float
    losses: tuple[float, ...] = field(repr=False)
    grad_norms: tuple[float, ...] = field(repr=False)
    head_sha256: str = ""
    acceptance: Mapping[str, Counts] = field(default_factory=dict)


@dataclass(frozen=True)
class _Texts:
    """The target's greedy answers to the long prompts, and its states over both."""

    generations: Sequence[Generation]
    hidden: Sequence[HiddenSequence]


def read_run(path: Path) -> tuple[Config, RunFigures]:
    """Settings and training curve of a finished run. Raises ``ValueError`` for any other."""
    record = path / "checkpoints" / "train.json"
    if not record.is_file() or not read_json(record).get("finished"):
        raise ValueError(f"run={path}: training has not finished there")
    config = load_config(yaml.safe_load((path / "config.yaml").read_text()))
    if config.head.norms not in NORM_NAMES:
        raise ValueError(f"run={path}: head.norms={config.head.norms} is no part of this study")
    steps = {e["step"]: e for e in read_events(path / "events.jsonl", stage="train", event="step")}
    ends = list(read_events(path / "events.jsonl", event="stage_finished"))
    conditioning = Conditioning(1.0)
    if (Path(config.target.path) / RECORD_NAME).is_file():
        conditioning = open_conditioned(Path(config.target.path)).conditioning
    rows = [steps[number] for number in sorted(steps)]
    return config, RunFigures(
        name=path.name,
        head=NORM_NAMES[config.head.norms],
        init=config.head.init,
        prompts=Path(config.data.path).parent.name.removeprefix("norms-"),
        scale=conditioning.scale,
        num_outliers=conditioning.num_outliers,
        outlier_scale=conditioning.outlier_scale,
        seed=config.seed,
        learning_rate=config.trainer.learning_rate,
        num_tokens=sum(row["num_tokens"] for row in rows),
        num_active=sum(row["num_active"] for row in rows),
        skipped=rows[-1]["skipped"],
        train_s=sum(e["wall_s"] for e in ends),
        losses=tuple(round(float(row["logit_loss"]), 4) for row in rows),
        grad_norms=tuple(round(float(row["grad_norm"]), 4) for row in rows),
    )


class Meter:
    """One target, and every head that was trained for it."""

    def __init__(self, config: Config, settings: Settings, *, long_set: Path) -> None:
        self._settings = settings
        self._subject = open_subject(config, Path(), device=torch.device("cpu"))
        self._dtype = self._subject.runtime_dtype
        tokenizer = load_tokenizer(config.target, self._subject.target(self._dtype).path)
        chosen = evaluation_prompts("mtbench", tokenizer, settings.mtbench_prompts)
        self._mtbench = [prompt.prompt_ids for prompt in chosen]
        self._texts = self._answer(long_prompts(long_set, settings.long_prompts))

    def measure(self, head_dir: Path) -> tuple[str, dict[str, Counts]]:
        """sha256 of the head's weights, and its counts by prompt set."""
        subject = self._subject.with_head(head_dir)
        requests = make_requests(self._mtbench, max_tokens=self._settings.max_tokens)
        generations = decode_waves(
            subject.target(self._dtype),
            requests,
            head=subject.head(self._dtype),
            k=K,
            engine_config=subject.engine_config,
        )
        sums = acceptance_sums(generations, K)
        decoded = Counts(tuple(sums[:, 0].tolist()), tuple(sums[:, 1].tolist()))
        counts = {"mtbench": decoded, "long_prompts": self._replay(subject)}
        return subject.head_sha256["model.safetensors"], counts

    def _replay(self, subject: Subject) -> Counts:
        generations = self._texts.generations
        starts = [
            range(len(g.prompt_ids) - 1, len(g.prompt_ids) + len(g.output_ids) - 2)
            for g in generations
        ]
        drafts = training_drafts(
            subject.training_head(self._dtype),
            self._texts.hidden,
            starts,
            num_steps=K,
            embedding_VD=subject.embedding(self._dtype),
            lm_head_VD=subject.lm_head(self._dtype),
        )
        pairs = [
            walk(g.output_ids, own_SK[:, 0].tolist())
            for g, own_SK in zip(generations, drafts, strict=True)
        ]
        return Counts(tuple(d for d, _ in pairs), tuple(a for _, a in pairs))

    def _answer(self, prompts: Sequence[Sequence[int]]) -> _Texts:
        target = self._subject.target(self._dtype)
        requests = make_requests(prompts, max_tokens=self._settings.max_tokens)
        generations = decode_waves(target, requests, engine_config=self._subject.engine_config)
        sequences = [(*g.prompt_ids, *g.output_ids) for g in generations]
        longest = max(len(ids) for ids in sequences)
        engine_config = dataclasses.replace(
            self._subject.engine_config,
            max_model_len=longest + 1,
            num_pages=2 + longest // self._subject.engine_config.page_size,
        )
        engine = Engine(target.model, config=engine_config)
        states = {int(rows.key): rows.hidden_TD for rows in engine.forward_hidden(sequences)}
        hidden = [HiddenSequence(torch.tensor(ids), states[i]) for i, ids in enumerate(sequences)]
        return _Texts(generations, hidden)


def walk(output_ids: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """Verification steps over a greedy output and how many of them accepted their one draft.

    ``drafts[s - 1]``: what was drafted for output index ``s``; index 0 comes from prefill.
    """
    steps = accepted = 0
    position = 1
    while position < len(output_ids):
        is_right = drafts[position - 1] == output_ids[position]
        steps, accepted = steps + 1, accepted + is_right
        position += 1 + is_right
    return steps, accepted


def long_prompts(token_set: Path, count: int) -> list[tuple[int, ...]]:
    """Rows of the validation split up to their last answer, evenly spaced over the split."""
    rows = [row for row in load_token_set(token_set).rows("validation") if any(row.loss_mask)]
    prompts = []
    for row in rows:
        mask = row.loss_mask
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        prompts.append(tuple(row.input_ids[: starts[-1]]))
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every run that is named and not measured yet; the file is replaced after each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m mtp_train.studies.norms")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--long-set", required=True, type=Path, help="token set of long prompts")
    given = parser.parse_args(arguments)
    settings = Settings()
    found = [(path, *read_run(path)) for path in given.runs]
    stored = read_json(given.out) if given.out.is_file() else {}
    results: dict[str, Any] = {row["name"]: row for row in stored.get("runs", [])}
    for target in dict.fromkeys(config.target.path for _, config, _ in found):
        meter: Meter | None = None
        for path, config, figures in found:
            if config.target.path != target or figures.name in results:
                continue
            if meter is None:
                set_threads(config.runtime.num_threads)
                meter = Meter(config, settings, long_set=given.long_set)
            sha256, counts = meter.measure(path / "head")
            rates = {k: sum(c.accepted) / max(1, sum(c.drafts)) for k, c in counts.items()}
            logger.info("%s: %s", figures.name, {k: round(v, 4) for k, v in rates.items()})
            results[figures.name] = dataclasses.replace(
                figures, head_sha256=sha256, acceptance=counts
            )
            write_json_atomic(
                given.out,
                {
                    "settings": settings,
                    "machine": describe_machine(),
                    "runs": [results[name] for name in sorted(results)],
                },
            )


if __name__ == "__main__":
    main()

"""What the norms of a head do: the runs of ``+experiment=norms`` measured on the same prompts.

    python -m mtp_train.studies.norms --out docs/norms.json \\
        --answers runs/norms-answers.safetensors \\
        --long-set runs/norms-long_prompts/data runs/norms*=*

MT-Bench is decoded in the runtime, target and head together. For long prompts the target's greedy
answers and its states over them are computed once, in the runtime, and every head's drafts are
replayed over them (rung P3: steps and accepted drafts are those of decoding, without a prefill of
thousands of rows per head); MT-Bench is replayed as well, so that the two can be compared. Heads of
a reparametrised target get the same answers and the states times its diagonal, which are its own
(``mtp_train.conditioning``). Goes on where it stopped.
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
from safetensors.torch import load_file, save

from data_prep.evaluation import evaluation_prompts
from data_prep.token_set import load_token_set
from mtp_train.conditioning import RECORD_NAME, Conditioning, open_conditioned
from mtp_train.config import Config, HeadNorms
from mtp_train.events import read_events, to_jsonable
from mtp_train.features.target import (
    cache_directory,
    load_tokenizer,
    target_directory,
    target_dtype,
)
from mtp_train.heads import build_training_head
from mtp_train.heads.base import TrainingHead
from mtp_train.run_dir import describe_machine, read_json, write_json_atomic
from mtp_train.settings import load_config
from mtp_train.targets import open_target
from mtp_train.validate.measure import acceptance_sums, decode_waves, make_requests
from mtp_train.validate.replay import walk_output
from mtp_train.validate.subject import open_subject
from mtp_train.validate.unroll import HiddenSequence, training_drafts
from runtime.config import EngineConfig
from runtime.cpu import set_threads
from runtime.engine import Engine
from runtime.files import sha256_file, write_atomic
from runtime.head_spec import load_head
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config as load_target_config
from runtime.models.loader import Target, fingerprint_target

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

    mtbench_prompts: int = 40
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
class Answer:
    """The target's greedy answer to one prompt and its states over both."""

    prompt_len: int
    input_ids: torch.Tensor  # int64 [T], the answer included
    hidden: torch.Tensor = field(repr=False)  # [T, D], the runtime's dtype


Answers = Mapping[str, Sequence[Answer]]


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
    conditioning = _conditioning(config)
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


def answer_prompts(
    config: Config, settings: Settings, *, long_set: Path
) -> dict[str, list[Answer]]:
    """Both prompt sets answered by the configuration's target."""
    target = open_target(config.target, device=torch.device("cpu"), runtime=config.runtime)
    tokenizer = load_tokenizer(config.target, target.path)
    prompts: dict[str, list[tuple[int, ...]]] = {
        "mtbench": [
            prompt.prompt_ids
            for prompt in evaluation_prompts("mtbench", tokenizer, settings.mtbench_prompts)
        ],
        "long_prompts": long_prompts(long_set, settings.long_prompts),
    }
    return {
        name: answer(target, chosen, config.runtime, max_tokens=settings.max_tokens)
        for name, chosen in prompts.items()
    }


def answer(
    target: Target, prompts: Sequence[Sequence[int]], runtime: EngineConfig, *, max_tokens: int
) -> list[Answer]:
    """Greedy answers, and the states of a forward over prompt and answer."""
    requests = make_requests(prompts, max_tokens=max_tokens)
    generations = decode_waves(target, requests, engine_config=runtime)
    sequences = [(*g.prompt_ids, *g.output_ids) for g in generations]
    longest = max(len(ids) for ids in sequences)
    fitting = dataclasses.replace(
        runtime, max_model_len=longest + 1, num_pages=2 + longest // runtime.page_size
    )
    engine = Engine(target.model, config=fitting)
    states = {int(rows.key): rows.hidden_TD for rows in engine.forward_hidden(sequences)}
    return [
        Answer(len(generation.prompt_ids), torch.tensor(ids), states[index])
        for index, (generation, ids) in enumerate(zip(generations, sequences, strict=True))
    ]


def save_answers(file: Path, answers: Answers) -> None:
    tensors = {}
    for name, items in answers.items():
        for index, item in enumerate(items):
            key = f"{name}.{index:03d}"
            tensors[f"{key}.prompt_len"] = torch.tensor(item.prompt_len)
            tensors[f"{key}.input_ids"] = item.input_ids
            tensors[f"{key}.hidden"] = item.hidden.clone()
    write_atomic(file, save(tensors))


def load_answers(file: Path) -> dict[str, list[Answer]]:
    tensors = load_file(file)
    answers: dict[str, list[Answer]] = {}
    for key in sorted({name.rpartition(".")[0] for name in tensors}):
        answers.setdefault(key.partition(".")[0], []).append(
            Answer(
                int(tensors[f"{key}.prompt_len"]),
                tensors[f"{key}.input_ids"],
                tensors[f"{key}.hidden"],
            )
        )
    return answers


class Meter:
    """One target's embedding, ``lm_head`` and states, and every head that was trained for it."""

    def __init__(self, config: Config, answers: Answers) -> None:
        cache = cache_directory(config.target)
        directory = target_directory(config.target)
        shapes = load_target_config(directory)
        checkpoint = Checkpoint.of(directory, shapes)
        self._dtype = target_dtype(config.target, torch.device("cpu"))
        self._fingerprint = fingerprint_target(directory, cache_dir=cache)
        self._embedding_VD, self._lm_head_VD = checkpoint.read_vocabulary(
            dtype=self._dtype, device=torch.device("cpu")
        )
        diagonal_D = _conditioning(config).diagonal(shapes.hidden_size)
        self._answers = {
            name: [
                dataclasses.replace(item, hidden=(item.hidden.float() * diagonal_D).to(self._dtype))
                for item in items
            ]
            for name, items in answers.items()
        }

    @torch.inference_mode()
    def replay(self, head_dir: Path) -> dict[str, Counts]:
        """Counts by prompt set. Raises ``ValueError`` for the head of another target."""
        spec, tensors = load_head(head_dir)
        if spec.target_fingerprint != self._fingerprint:
            raise ValueError(f"head={head_dir}: was trained for another target")
        head = build_training_head(spec, dtype=self._dtype).eval()
        head.load_tensors(tensors)
        return {name: self._count(head, items) for name, items in self._answers.items()}

    def _count(self, head: TrainingHead, items: Sequence[Answer]) -> Counts:
        starts = [range(item.prompt_len - 1, len(item.input_ids) - 2) for item in items]
        drafts = training_drafts(
            head,
            [HiddenSequence(item.input_ids, item.hidden) for item in items],
            starts,
            num_steps=K,
            embedding_VD=self._embedding_VD,
            lm_heads=(self._lm_head_VD,),
        )
        pairs = [
            walk(item.input_ids[item.prompt_len :].tolist(), own_SK[:, 0].tolist())
            for item, own_SK in zip(items, drafts, strict=True)
        ]
        return Counts(tuple(d for d, _ in pairs), tuple(a for _, a in pairs))


def decode(config: Config, head_dir: Path, answers: Answers, settings: Settings) -> Counts:
    """MT-Bench in the runtime, target and head together; counted after trimming, as replays are."""
    subject = open_subject(config, head_dir, device=torch.device("cpu"))
    dtype = subject.runtime_dtype
    prompts = [item.input_ids[: item.prompt_len].tolist() for item in answers["mtbench"]]
    generations = decode_waves(
        subject.target(dtype),
        make_requests(prompts, max_tokens=settings.max_tokens),
        head=subject.head(dtype),
        k=K,
        engine_config=subject.engine_config,
    )
    sums = acceptance_sums(generations, K, trimmed=True)
    return Counts(tuple(sums[:, 0].tolist()), tuple(sums[:, 1].tolist()))


def walk(output_ids: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """Verification steps over a greedy output and how many of them accepted their one draft.

    ``drafts[s - 1]``: what was drafted for output index ``s``; index 0 comes from prefill.
    """
    steps = walk_output(output_ids, [(token,) for token in drafts])
    return len(steps), sum(step.num_accepted for step in steps)


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


def _conditioning(config: Config) -> Conditioning:
    path = Path(config.target.path)
    is_written = (path / RECORD_NAME).is_file()
    return open_conditioned(path).conditioning if is_written else Conditioning(1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every run that is named and not measured yet; the file is replaced after each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m mtp_train.studies.norms")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--answers", required=True, type=Path, help="kept between calls")
    parser.add_argument("--long-set", required=True, type=Path, help="token set of long prompts")
    given = parser.parse_args(arguments)
    settings = Settings()
    found = [(path, *read_run(path)) for path in given.runs]
    stored = read_json(given.out) if given.out.is_file() else {}
    results: dict[str, Any] = {row["name"]: row for row in stored.get("runs", [])}
    set_threads(found[0][1].runtime.num_threads)
    if not given.answers.is_file():
        plain = [config for _, config, _ in found if _conditioning(config) == Conditioning(1.0)]
        if not plain:
            parser.error("runs: none is of the target as it is, which answers the prompts")
        save_answers(given.answers, answer_prompts(plain[0], settings, long_set=given.long_set))
    answers = load_answers(given.answers)
    meters: dict[str, Meter] = {}
    for path, config, figures in found:
        row = to_jsonable(figures) | results.get(figures.name, {})
        sha256 = sha256_file(path / "head" / "model.safetensors")
        if row["head_sha256"] != sha256:
            row = to_jsonable(dataclasses.replace(figures, head_sha256=sha256))
        if not row["acceptance"]:
            if config.target.path not in meters:
                meters = {config.target.path: Meter(config, answers)}
            replayed = meters[config.target.path].replay(path / "head")
            counts = {
                "mtbench": decode(config, path / "head", answers, settings),
                "mtbench_replayed": replayed["mtbench"],
                "long_prompts": replayed["long_prompts"],
            }
            row["acceptance"] = to_jsonable(counts)
        results[figures.name] = row
        rates = {
            name: round(sum(c["accepted"]) / max(1, sum(c["drafts"])), 4)
            for name, c in row["acceptance"].items()
        }
        logger.info("%s: %s", figures.name, rates)
        rows = [results[name] for name in sorted(results)]
        values = {"settings": settings, "machine": describe_machine(), "runs": rows}
        write_json_atomic(given.out, values)


if __name__ == "__main__":
    main()

"""`mtp hot-vocab`: cut lists out of the answers, measure a head with each, keep the heads."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data_prep.token_set import load_token_set
from mtp_train.answer_tokens import count_answer_tokens, train_rows
from mtp_train.config import Config
from mtp_train.export.engines import servable_by
from mtp_train.export.weights import hash_files
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.hot_vocab.compare import WHOLE, Row, emitted_share, measure_sizes, time_sizes
from mtp_train.hot_vocab.lists import make_lists, write_heads
from mtp_train.run_dir import RunDirectory, StageRecord, read_json, write_json_atomic
from mtp_train.validate.prompt_sets import draft_lengths, load_prompt_sets
from mtp_train.validate.subject import Subject, open_subject
from runtime.cpu import set_threads
from runtime.models.loader import fingerprint_target
from runtime.seeds import derive_seed

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)

RECORD_NAME = "made.json"  # beside the heads: what they were made of


@dataclass(frozen=True)
class HotVocabReport:
    """The content of ``hot_vocab.json``; ``is_new`` is false when nothing had to be measured."""

    rows: tuple[dict[str, Any], ...]
    heads: dict[str, str]  # by size
    why_not_served: str
    is_new: bool

    @classmethod
    def read(cls, file: Path, *, is_new: bool) -> HotVocabReport:
        content = read_json(file)
        return cls(tuple(content["rows"]), content["heads"], content["why_not_served"], is_new)


def run(config: Config, *, device: torch.device) -> HotVocabReport:
    """Cut, measure and write (leader only), unless that was done with this head and these settings.

    Raises ``ValueError`` without a token set, for a head that drafts from a list already, or for a
    size that the target's vocabulary does not have.
    """
    run_dir = RunDirectory.from_config(config)
    token_set = load_token_set(run_dir.data)
    out_dir, out_file = run_dir.root / "hot_vocab", run_dir.root / "hot_vocab.json"
    record = StageRecord(
        out_dir / RECORD_NAME,
        stage="hot-vocab",
        fingerprint=_inputs(config, run_dir, token_set.fingerprint["content"], device),
    )
    differences = record.differences()
    if differences:
        logger.warning("measuring again: %s", "; ".join(differences))
    elif record.state() == "finished" and out_file.is_file():
        return HotVocabReport.read(out_file, is_new=False)
    record.start()
    if device.type == "cpu":
        set_threads(config.runtime.num_threads)
    whole = open_subject(config, run_dir.head, device=device)
    counts_V = count_answer_tokens(train_rows(token_set), vocab_size=whole.spec.vocab_size)
    lists = make_lists(counts_V, config.hot_vocab.sizes)
    for hot in lists:
        logger.info("%d ids: %.2f %% of the answer tokens", hot.size, 100 * hot.coverage)
    heads = write_heads(run_dir.head, lists, out_dir)
    subjects = {WHOLE: whole} | {size: whole.with_head(place) for size, place in heads.items()}
    rows = _measure(config, subjects)
    content = {
        "head_sha256": whole.head_sha256,
        "heads": {str(size): str(place) for size, place in heads.items()},
        "why_not_served": servable_by(subjects[lists[0].size].spec).why,
        "rows": [row.to_dict() for row in rows],
    }
    write_json_atomic(out_file, content)
    record.finish()
    return HotVocabReport.read(out_file, is_new=True)


def _measure(config: Config, subjects: dict[int, Subject]) -> list[Row]:
    settings, lengths = config.hot_vocab, draft_lengths(config)
    chosen = load_prompt_sets(config, subjects[WHOLE])[0]
    measured = measure_sizes(
        subjects,
        chosen.prompts,
        draft_lengths=lengths,
        max_tokens=config.validate.max_tokens,
        temperature=config.validate.temperature,
        prompt_set=chosen.name,
        seed=derive_seed(config.seed, "ladder"),
    )
    for (size, k), item in measured.items():
        logger.info("%s, K=%d: tau %.3f", size or "whole vocabulary", k, item.acceptance.tau)
    count = min(settings.speed_prompts, len(chosen.prompts))
    timed = {}
    if count:
        timed = time_sizes(
            subjects,
            [chosen.prompts[i * len(chosen.prompts) // count] for i in range(count)],
            draft_lengths=lengths,
            max_tokens=settings.speed_tokens,
            repeats=settings.speed_repeats,
            prompt_set=chosen.name,
        )
    rows = []
    for (size, k), item in measured.items():
        spec = subjects[size].spec
        ids_W = subjects[size].draft_columns()
        speed, gain = timed.get((size, k), (None, None))
        rows.append(
            Row(
                size=size,
                coverage=spec.draft_vocab.coverage if spec.draft_vocab else 1.0,
                emitted_share=1.0 if ids_W is None else emitted_share(item, ids_W.tolist()),
                served_by=str(servable_by(spec)),
                measured=item,
                speed=speed,
                gain=gain,
            )
        )
    return rows


def _inputs(
    config: Config, run_dir: RunDirectory, tokens: Any, device: torch.device
) -> dict[str, Any]:
    """Everything that decides lists and figures, by content."""
    names = ("k", "max_tokens", "temperature", "sets", "max_prompts")
    validate = asdict(replace(config.validate, sets=config.validate.sets[:1]))
    return {
        "head": hash_files(run_dir.head),
        "target": fingerprint_target(
            target_directory(config.target), cache_dir=cache_directory(config.target)
        ),
        "tokens": tokens["train"],
        "hot_vocab": asdict(config.hot_vocab),
        "validate": {name: validate[name] for name in names},
        "runtime": asdict(config.runtime) | {"device": str(device), "dtype": config.target.dtype},
        "seed": config.seed,
    }


def table(report: HotVocabReport) -> Table:
    """One row per vocabulary and K; every figure with its interval."""
    from mtp_train.console import make_table

    columns = ("ids", "of answers", "K", "tokens per step", "speed", "over all")
    return make_table("draft vocabulary", columns, [_cells(row) for row in report.rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["tau_interval"]
    speed, gain = row["speed"], row["speed_over_whole"]
    return (
        f"{row['size']:,}" if row["size"] else "all",
        f"{row['coverage']:.2%}",
        str(row["k"]),
        f"{row['tau']:.3f} {low:.2f}–{high:.2f}",
        f"{speed['speedup']:.2f} {speed['low']:.2f}–{speed['high']:.2f}" if speed else "–",
        f"{gain['ratio']:.2f} {gain['low']:.2f}–{gain['high']:.2f}" if gain else "–",
    )


def describe(report: HotVocabReport, root: Path) -> str:
    """Which list to take, and who can serve it."""
    timed = [row for row in report.rows if row["speed"]]
    lines = []
    if timed:
        best = max(timed, key=lambda row: row["speed"]["speedup"])
        where = f"{best['size']:,} ids" if best["size"] else "the whole vocabulary"
        lines.append(
            f"fastest at batch 1: {where} at K={best['k']}, {best['speed']['speedup']:.3f} times "
            "plain decoding"
        )
    sizes = ", ".join(report.heads)
    lines.append(f"heads: {root / 'hot_vocab'}/SIZE for {sizes} (as validate.head, generate.head)")
    served = {row["served_by"] for row in report.rows if row["size"]}
    lines.append(f"a head with a list can be served by: {', '.join(sorted(served))}")
    lines.append(f"why: {report.why_not_served}")
    return "\n".join(lines)

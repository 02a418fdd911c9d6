"""The parity ladder: acceptance first, then the chosen rungs, then one report.

The first rank climbs, the others wait for its report. Prompts are those of the evaluation sets
that the configuration names (``validate.sets``); stored features and token rows are the run's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from data_prep.token_set import load_token_set, read_fingerprint
from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup
from mtp_train.features.manifest import MANIFEST_NAME
from mtp_train.features.reader import FeatureReader
from mtp_train.run_dir import RunDirectory
from mtp_train.validate import p0, p1, p2, p3, p4, p5
from mtp_train.validate.breakdown import break_down, furthest_context
from mtp_train.validate.changed_target import examine_change
from mtp_train.validate.journal import FinishedRung, RungJournal
from mtp_train.validate.measure import Measured, measure_acceptance, rate_intervals
from mtp_train.validate.output import write_report
from mtp_train.validate.prompt_counts import count_prompts
from mtp_train.validate.prompt_sets import (
    MeasuredSet,
    PromptSet,
    draft_lengths,
    load_prompt_sets,
    measure_sets,
)
from mtp_train.validate.report import (
    AcceptanceResult,
    BreakdownRow,
    ContextLengths,
    LadderReport,
    RungResult,
    SpeedResult,
    now,
)
from mtp_train.validate.samples import Answered, Samples, choose_samples, choose_training_row
from mtp_train.validate.subject import Subject, open_subject
from runtime.cpu import set_threads
from runtime.request import Generation

_Item = TypeVar("_Item")

logger = logging.getLogger(__name__)

RUNGS = ("P0", "P1", "P2", "P3", "P4", "P5")
_SEQUENCE_LENS = (200, 64, 150, 33, 90, 120)  # prompt + answer, cut to different lengths


def run(config: Config, *, group: ProcessGroup, journal: RungJournal | None = None) -> LadderReport:
    """Climb the rungs of ``config.validate.rungs`` (a collective); those that ``journal`` holds are
    not climbed again.

    Writes the report (:func:`write_report`); the verdict is in it.
    Raises ``ValueError`` for an unknown rung, a head of another target or a missing prompt set.
    """
    report = _climb_leader_only(config, group, journal) if group.is_leader else None
    shared: LadderReport = group.broadcast_object(report)
    return shared


def _climb_leader_only(
    config: Config, group: ProcessGroup, journal: RungJournal | None
) -> LadderReport:
    unknown = [name for name in config.validate.rungs if name not in RUNGS]
    if unknown:
        raise ValueError(f"validate.rungs: {unknown[0]!r} is unknown; allowed: {', '.join(RUNGS)}")
    if group.device.type == "cpu":
        set_threads(config.runtime.num_threads)
    run_dir = RunDirectory.from_config(config)
    subject = open_subject(config, run_dir.head, device=group.device, may_differ=True)
    sets = load_prompt_sets(config, subject)
    report = climb(
        config,
        subject,
        sets,
        stores=open_stores(run_dir),
        missing_stores=find_missing_stores(config, run_dir),
        run_dir=run_dir,
        journal=journal,
    )
    write_report(report, subject.spec, run_dir)
    show_report(report)
    return report


def climb(
    config: Config,
    subject: Subject,
    sets: Sequence[PromptSet],
    *,
    stores: Sequence[FeatureReader] = (),
    missing_stores: Sequence[Path] = (),
    run_dir: RunDirectory | None = None,
    journal: RungJournal | None = None,
) -> LadderReport:
    """Measure acceptance on every set, then climb. The first set also feeds the rungs."""
    settings = config.validate
    measured = measure_sets(config, subject, sets)
    served = _served(subject, sets[0], measured, config)
    sequences = cut_sequences(served)
    prompts = sets[0].prompts
    k, lengths = settings.k, draft_lengths(config)
    speed: list[SpeedResult] = []  # of the rung that is being climbed

    def climb_p5() -> RungResult:
        result, rows = p5.check(subject, prompts, draft_lengths=lengths, prompt_set=sets[0].name)
        speed.extend(rows)
        return result

    rungs: dict[str, Callable[[], RungResult]] = {
        "P0": lambda: p0.check(
            subject,
            sequences,
            stores=stores,
            missing_stores=missing_stores,
            token_rows=_token_rows(run_dir, stores),
            max_logprob_gap=config.features.p0_max_logprob_gap,
            max_kl=config.features.p0_max_kl,
        ),
        "P1": lambda: p1.check(subject, sequences),
        "P2": lambda: p2.check(subject, sequences, k=k),
        "P3": lambda: p3.check(
            subject,
            _spread(prompts, 8),
            k=k,
            max_tokens=48,
            min_drafts=settings.min_drafts,
            served=served,
        ),
        "P4": lambda: p4.check(subject, _spread(prompts, 16), k=k),
        "P5": climb_p5,
    }
    if journal is not None and dict(journal.head_sha256) != subject.head_sha256:
        journal = None  # the head was replaced since: its rungs may not pass for the other's
    kept = journal.read() if journal is not None else {}
    finished: list[FinishedRung] = []
    for name in RUNGS:
        if name not in settings.rungs:
            continue
        if name in kept:
            logger.info("%s: finished before the ladder was interrupted", name)
            finished.append(kept[name])
            continue
        speed.clear()
        started = time.perf_counter()
        result = rungs[name]()
        result = replace(result, seconds=time.perf_counter() - started, climbed_at=now())
        logger.info(
            "%s %s in %.1f s: %s",
            name,
            "passed" if result.passed else "FAILED",
            result.seconds,
            result.note,
        )
        finished.append(FinishedRung(result, tuple(speed)))
        if journal is not None:
            journal.write(finished)
    trained_len = _trained_len(stores, subject, run_dir)
    change = None
    if subject.is_of_another_target:
        change = examine_change(config, subject, _at_k(measured, sets[0], settings.k))
    return LadderReport(
        target=subject.target(subject.runtime_dtype).fingerprint,
        head=str(subject.head_path),
        head_sha256=subject.head_sha256,
        rungs=tuple(rung.result for rung in finished),
        acceptance=tuple(_describe(item.measured) for item in measured),
        speed=tuple(row for rung in finished for row in rung.speed),
        breakdown=tuple(row for item in measured for row in _break_down(item, trained_len)),
        lengths=ContextLengths(trained_len, furthest_context([item.measured for item in measured])),
        samples=_samples(measured, k, run_dir) if config.report.samples else None,
        change=change,
    )


def open_stores(run_dir: RunDirectory) -> list[FeatureReader]:
    """The run's feature stores that exist; shards that are gone are left out."""
    return [
        FeatureReader(place, missing="skip")
        for place in _store_places(run_dir)
        if (place / MANIFEST_NAME).is_file()
    ]


def find_missing_stores(config: Config, run_dir: RunDirectory) -> list[Path]:
    """Stores that the run lacks. None for a head from elsewhere in a run without a token set:
    there is nothing that features could have been made of.
    """
    if config.validate.head and read_fingerprint(run_dir.data) is None:
        return []
    return [place for place in _store_places(run_dir) if not (place / MANIFEST_NAME).is_file()]


def _store_places(run_dir: RunDirectory) -> list[Path]:
    return [run_dir.features / split for split in ("train", "validation")]


def cut_sequences(served: Sequence[Generation]) -> list[list[int]]:
    """Prompt and answer of a few generations, cut to different lengths."""
    chosen = _spread(served, len(_SEQUENCE_LENS))
    return [
        [*generation.prompt_ids, *generation.output_ids][:length]
        for generation, length in zip(chosen, _SEQUENCE_LENS, strict=False)
    ]


def show_report(report: LadderReport) -> None:
    """Verdicts and acceptance as tables."""
    from mtp_train.console import make_console, make_table

    console = make_console()
    verdicts = [
        (rung.name, "passed" if rung.passed else "FAILED", f"{rung.seconds:.1f} s", rung.note)
        for rung in report.rungs
    ]
    console.print(make_table("parity ladder", ("rung", "verdict", "time", "what"), verdicts))
    rows = [
        (
            row.prompt_set,
            row.counts.k,
            f"{row.counts.tau:.3f} [{row.tau_low:.3f}, {row.tau_high:.3f}]",
            " ".join(f"{rate:.3f}" for rate in row.counts.rates),
            row.counts.num_drafts,
            row.num_prompts,
        )
        for row in report.acceptance
    ]
    names = ("set", "K", "tokens per step", "accepted by position", "drafts", "prompts")
    console.print(make_table("acceptance", names, rows))
    for line in report.change.lines() if report.change is not None else ():
        console.print(line, markup=False, soft_wrap=True)


def _served(
    subject: Subject, chosen: PromptSet, measured: Sequence[MeasuredSet], config: Config
) -> tuple[Generation, ...]:
    """Greedy generations of the first set at ``validate.k``, for P3 and as sequences."""
    settings = config.validate
    for item in (entry.measured for entry in measured):
        is_wanted = item.prompt_set == chosen.name and item.k == settings.k
        if is_wanted and item.temperature == 0 and item.draft_mode == "argmax":
            return item.generations
    return measure_acceptance(
        subject.target(subject.runtime_dtype),
        subject.head(subject.runtime_dtype),
        chosen.prompts,
        k=settings.k,
        max_tokens=settings.max_tokens,
        temperature=0.0,
        engine_config=replace(subject.engine_config, draft_mode="argmax"),
        prompt_set=chosen.name,
    ).generations


def _at_k(measured: Sequence[MeasuredSet], chosen: PromptSet, k: int) -> Measured:
    items = (entry.measured for entry in measured)
    return next(item for item in items if item.prompt_set == chosen.name and item.k == k)


def _token_rows(
    run_dir: RunDirectory | None, stores: Sequence[FeatureReader]
) -> dict[str, tuple[int, ...]] | None:
    """Tokens by sample id, of the run's token set; ``None`` when there is no finished one."""
    if run_dir is None or not stores:
        return None
    if read_fingerprint(run_dir.data) is None:
        return None
    token_set = load_token_set(run_dir.data)
    wanted = {sample_id for store in stores for sample_id in store.sample_ids}
    rows = [row for split in ("train", "validation") for row in token_set.rows(split)]
    return {row.sample_id: row.input_ids for row in rows if row.sample_id in wanted}


def _describe(item: Measured) -> AcceptanceResult:
    return AcceptanceResult(
        prompt_set=item.prompt_set,
        temperature=item.temperature,
        draft_mode="sampled" if item.draft_mode == "sampled" else "argmax",
        counts=item.acceptance,
        num_prompts=item.num_prompts,
        max_tokens=item.max_tokens,
        tau_low=item.tau_interval.low,
        tau_high=item.tau_interval.high,
        tau_level=item.tau_interval.level,
        rate_intervals=tuple(
            (interval.low, interval.high)
            for interval in rate_intervals(item.generations, item.k, level=item.tau_interval.level)
        ),
        prompts=count_prompts(item.generations, item.k),
    )


def _break_down(item: MeasuredSet, trained_len: int | None) -> list[BreakdownRow]:
    chosen = item.prompt_set
    return break_down(
        item.measured,
        categories=chosen.tasks,
        scripts=chosen.scripts,
        decode=chosen.decode,
        trained_len=trained_len,
    )


def _trained_len(
    stores: Sequence[FeatureReader], subject: Subject, run_dir: RunDirectory | None
) -> int | None:
    """Tokens of the longest sample of the train store; ``None`` for a head of another run."""
    if run_dir is None or not subject.head_path.resolve().is_relative_to(run_dir.root.resolve()):
        return None
    lengths = [s.lengths for s in stores if s.path.name == "train" and len(s)]
    return int(lengths[0].max()) if lengths else None


def _samples(
    measured: Sequence[MeasuredSet], k: int, run_dir: RunDirectory | None
) -> Samples | None:
    """Answers at ``k`` and a training row; ``None`` where there is no tokenizer."""
    decode = measured[0].prompt_set.decode
    if decode is None:
        return None
    answered = [
        Answered(item.prompt_set.name, item.prompt_set.tasks, item.measured.generations)
        for item in measured
        if item.measured.k == k
    ]
    row = None
    if run_dir is not None and read_fingerprint(run_dir.data) is not None:
        row = choose_training_row(load_token_set(run_dir.data).rows("train"), decode)
    return Samples(k, choose_samples(answered, decode, k=k), row)


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most ``count`` items, evenly spaced."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]

"""Climbs rung P6: from the configuration to a verdict in every ``parity.json`` of the head.

It is climbed by itself, after the other rungs or long after them: the exported directory has to
exist, and it is made of a head that has passed them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.evaluation import evaluation_prompts
from mtp_train.config import Config
from mtp_train.export.reader import check_export, is_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.export.weights import hash_files
from mtp_train.features.target import (
    cache_directory,
    load_tokenizer,
    target_directory,
    target_dtype,
)
from mtp_train.run_dir import RunDirectory
from mtp_train.serving.engine import open_engine, served_lengths
from mtp_train.validate import p6
from mtp_train.validate.output import add_rung, stored_rung
from mtp_train.validate.report import RungResult, now
from mtp_train.validate.served import Serve, decode_ours, our_counts, serve_and_compare
from mtp_train.validate.subject import Subject, open_subject
from runtime.cpu import set_threads
from runtime.request import Generation
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

_GROW_BY = 16  # prompts decoded at once until there are drafts enough


@dataclass(frozen=True)
class Prompt:
    """Token ids and the evaluation set they are of."""

    set_name: str
    prompt_ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class EngineClimb:
    """``is_new`` is false where ``parity.json`` held the verdict of these inputs already."""

    result: RungResult
    is_new: bool


def exported_head(config: Config) -> Path:
    """The directory that is served. Raises ``ValueError`` saying what to run when there is none,
    when it is of another head, or when it is not what was written.
    """
    run = RunDirectory.from_config(config)
    if is_export(run.head):  # validate.head names an exported directory
        directory = run.head
    else:
        directory = run.export(config.export.format)
        remedy = (
            f"`mtp export run.name={config.run.name} target.path={config.target.path} "
            f"export.format={config.export.format}`"
        )
        if not is_export(directory):
            raise ValueError(
                f"P6 serves the exported head, and {directory} is none: run {remedy} first "
                "(it wants a validated head: P0 to P5 come before it)"
            )
        if dict(ExportRecord.read(directory / EXPORT_NAME).head_sha256) != hash_files(run.head):
            raise ValueError(f"{directory} was made of another head than {run.head}: run {remedy}")
    check_export(
        directory,
        target_dir=target_directory(config.target),
        cache_dir=cache_directory(config.target),
    )
    return directory


def climb(config: Config, *, device: torch.device, serve: Serve | None = None) -> EngineClimb:
    """Serve, compare, and write the rung into the reports of run, head and export (for one rank).

    ``serve`` replaces the engine that ``config.engine`` names. Raises ``ValueError`` when there is
    no export, ``ServingError`` when the engine fails.
    """
    directory = exported_head(config)
    # Of the directory, which validate.head may name, not of the settings.
    record = ExportRecord.read(directory / EXPORT_NAME)
    config = replace(config, export=replace(config.export, format=record.format))
    inputs = engine_inputs(config, directory, device=device)
    run = RunDirectory.from_config(config)
    stored = stored_rung(run, "P6")
    # A failure is measured again: the engine is not ours, and what was wrong there may be mended.
    is_known = stored is not None and stored.passed and stored.figures.get("inputs") == inputs
    if stored is not None and is_known and not config.engine.url:
        return EngineClimb(stored, is_new=False)
    if device.type == "cpu":
        set_threads(config.runtime.num_threads)
    started = time.perf_counter()
    serve = serve or open_engine(config)
    greedy = replace(config.runtime, verify="greedy", draft_mode="argmax")
    subject = open_subject(replace(config, runtime=greedy), directory, device=device)
    runs = [
        run_engine(config, subject, dtype, k, prompts, serve=serve, generations=generations)
        for dtype in served_dtypes(config, subject)
        for k, prompts, generations in _plan(config, subject, dtype)
    ]
    result = p6.check(subject, runs, min_drafts=config.validate.min_drafts, inputs=inputs)
    result = replace(result, seconds=time.perf_counter() - started, climbed_at=now())
    add_rung(result, run, directory, target=subject.target(subject.runtime_dtype).fingerprint)
    return EngineClimb(result, is_new=True)


def run_engine(
    config: Config,
    subject: Subject,
    dtype: torch.dtype,
    k: int,
    prompts: Sequence[Prompt],
    *,
    serve: Serve,
    generations: Sequence[Generation] | None = None,
) -> p6.EngineRun:
    """Both sides over ``prompts``, at one dtype and one K."""
    pair = serve_and_compare(
        subject,
        [prompt.prompt_ids for prompt in prompts],
        k=k,
        dtype=dtype,
        max_tokens=_max_tokens(config, dtype),
        serve=serve,
        max_running=config.engine.max_running,
        generations=generations,
    )
    logger.info(
        "%s %s, K=%d, %s: %d prompts, %d drafts here and %d there, loaded in %.0f s, served in "
        "%.0f s",
        pair.served.engine,
        pair.served.version,
        k,
        pair.served.dtype,
        len(prompts),
        pair.our_sums[:, 0].sum(),
        pair.their_sums[:, 0].sum(),
        pair.served.load_s,
        pair.served.decode_s,
    )
    return p6.EngineRun(pair, tuple(prompt.set_name for prompt in prompts))


def served_dtypes(config: Config, subject: Subject) -> tuple[torch.dtype, ...]:
    """A server that runs has one dtype; an engine that is started gets both."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.engine.dtype != "auto":
        return (names[config.engine.dtype],)
    return (subject.runtime_dtype,) if config.engine.url else subject.dtypes


def load_prompts(config: Config, subject: Subject) -> dict[str, list[tuple[int, ...]]]:
    """Every prompt of ``engine.sets`` in an order of its own that depends on the seed alone, so
    that the first n of a set are a fair sample of it.
    """
    tokenizer = load_tokenizer(config.target, subject.target(subject.runtime_dtype).path)
    sets = {}
    for name in config.engine.sets:
        found = evaluation_prompts(
            name,
            tokenizer,
            chat_template=config.data.chat_template,
            chat_template_kwargs=config.data.chat_template_kwargs,
        )
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "p6", name))
        order = torch.randperm(len(found), generator=generator).tolist()
        sets[name] = [found[index].prompt_ids for index in order]
    return sets


def engine_inputs(config: Config, directory: Path, *, device: torch.device) -> dict[str, Any]:
    """Everything the figures depend on, by content where it is a file."""
    engine = asdict(config.engine)
    del engine["timeout_s"], engine["api_key_env"]
    engine |= {"args": dict(config.engine.args), "k": list(engine["k"])}
    record = ExportRecord.read(directory / EXPORT_NAME)
    return {
        "export": record.files_sha256,
        "target": record.head.target_fingerprint,
        "engine": engine | {"sets": list(engine["sets"])},
        "dtype": str(target_dtype(config.target, device)).removeprefix("torch."),
        "max_tokens": config.validate.max_tokens,
        "min_drafts": config.validate.min_drafts,
        "seed": config.seed,
        "chat_template_kwargs": dict(config.data.chat_template_kwargs),
    }


_Planned = tuple[int, list[Prompt], list[Generation] | None]


def _plan(config: Config, subject: Subject, dtype: torch.dtype) -> list[_Planned]:
    """For each K its prompts, and our side where choosing them took decoding them."""
    sets = load_prompts(config, subject)
    lengths = served_lengths(config)
    if dtype is torch.float32:
        share = -(-config.engine.exact_prompts // len(sets))
        prompts = [Prompt(name, ids) for name, found in sets.items() for ids in found[:share]]
        return [(k, prompts, None) for k in lengths]
    longest = max(lengths)  # accepts the most per step, so it drafts the fewest
    chosen: list[Prompt] = []
    decoded: list[Generation] = []
    for name, found in sets.items():
        mine = _decode_enough(config, subject, dtype, longest, found)
        decoded += mine
        chosen += [Prompt(name, generation.prompt_ids) for generation in mine]
    return [(k, chosen, decoded if k == longest else None) for k in lengths]


def _decode_enough(
    config: Config,
    subject: Subject,
    dtype: torch.dtype,
    k: int,
    found: Sequence[tuple[int, ...]],
) -> list[Generation]:
    """The first prompts of one set that make its share of ``validate.min_drafts`` and some more."""
    share = config.validate.min_drafts / len(config.engine.sets)
    wanted = share * 1.05  # the engine's texts, and so its drafts, differ
    decoded: list[Generation] = []
    size = max(_GROW_BY, config.engine.max_running)
    for start in range(0, len(found), size):
        decoded += decode_ours(
            subject,
            found[start : start + size],
            k=k,
            dtype=dtype,
            max_tokens=_max_tokens(config, dtype),
            max_running=config.engine.max_running,
        )
        if sum(our_counts(generation, k).drafts for generation in decoded) >= wanted:
            break
    return decoded


def _max_tokens(config: Config, dtype: torch.dtype) -> int:
    return config.engine.exact_tokens if dtype is torch.float32 else config.validate.max_tokens


def show(result: RungResult, print_table: Callable[[Any], None]) -> None:
    """Verdict and, per set, both sides' acceptance."""
    from mtp_train.console import make_table

    print_table(
        make_table(
            "P6",
            ("verdict", "time", "what"),
            [("passed" if result.passed else "FAILED", f"{result.seconds:.1f} s", result.note)],
        )
    )
    rows = [
        (
            row["set"],
            f"{row['dtype']}, K={row['k']}",
            f"{row['tau']:.3f}",
            f"{row['tau_served']:.3f}",
            row["drafts"],
            row["drafts_served"],
            f"{row['texts_that_part']} of {row['prompts']}",
        )
        for row in result.figures.get("sets", ())
    ]
    names = ("set", "what", "tau", "served", "drafts", "served", "texts part")
    print_table(make_table(str(result.figures.get("engine", "")), names, rows))

"""Heads trained on one form of a target and served on another: ``docs/quantised_targets.md``.

    python -m mtp_train.studies.quantised runs/bf16 runs/int8 --out cells.json

Every run names a target and has a head trained on its features; every head is measured on every
target, with the rungs P2 and P3, and every target by itself, with P0 and P1. A head states the
weights that it was trained with: in a cell it is bound to the target that it is served on.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data_prep.evaluation import evaluation_prompts
from mtp_train.config import Config
from mtp_train.features.target import load_tokenizer, target_directory
from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.settings import load_config
from mtp_train.validate import p0, p1, p2, p3
from mtp_train.validate.bootstrap import paired_interval, prompt_interval, tau_of_sums
from mtp_train.validate.ladder import cut_sequences
from mtp_train.validate.measure import acceptance_sums, measure_acceptance
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject, open_subject
from runtime.cpu import set_threads
from runtime.head_spec import load_head, save_head

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudySettings:
    """What every cell is measured on."""

    k: int = 3
    prompts: int = 40  # of MT-Bench, greedy
    max_tokens: int = 64
    exact_prompts: int = 4  # of P3, in fp32
    exact_tokens: int = 24
    min_drafts: int = 500  # of P3 in bf16: positions that fewer reach may stay undecided


def read_run(path: Path) -> Config:
    """Settings of a run with a head. Raises ``ValueError`` for another directory."""
    if not (path / "head" / "config.json").is_file():
        raise ValueError(f"run={path}: has no head; run `mtp train` first")
    return load_config(yaml.safe_load((path / "config.yaml").read_text()))


def bind_head(head: Path, out: Path, *, fingerprint: str) -> None:
    """The head as one of the target with that fingerprint; weights stay what they are."""
    spec, tensors = load_head(head)
    save_head(out, replace(spec, target_fingerprint=fingerprint), tensors)


def measure_cell(
    subject: Subject, prompts: Sequence[Sequence[int]], settings: StudySettings, *, first: bool
) -> dict[str, Any]:
    """Counts by prompt and rungs; with ``first`` also the rungs that are of the target alone."""
    dtype = subject.runtime_dtype
    measured = measure_acceptance(
        subject.target(dtype),
        subject.head(dtype),
        prompts,
        k=settings.k,
        max_tokens=settings.max_tokens,
        temperature=0.0,
        engine_config=subject.engine_config,
        prompt_set="mtbench",
    )
    served = measured.generations
    sequences = cut_sequences(served)
    k = settings.k
    rungs: list[RungResult] = []
    if first:
        rungs.append(p0.check(subject, sequences, max_logprob_gap=1e-4, max_kl=0.01))
        rungs.append(p1.check(subject, sequences))
    rungs.append(p2.check(subject, sequences, k=k))
    rungs.append(
        p3.check(
            subject,
            prompts[: settings.exact_prompts],
            k=k,
            max_tokens=settings.exact_tokens,
            min_drafts=settings.min_drafts,
            served=served,
        )
    )
    return {
        "sums": acceptance_sums(served, k).tolist(),
        "outputs": [list(generation.output_ids) for generation in served],
        "rungs": {rung.name: rung.to_dict(head_sha256=subject.head_sha256) for rung in rungs},
    }


def describe(cells: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """A Markdown table; differences are against the head of that target, paired by prompt."""
    lines = [
        "| served on | head trained on | τ | − own head | accepted by position | P2 | P3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for served in names:
        for head in names:
            cell, own = cells.get(f"{head}:{served}"), cells.get(f"{served}:{served}")
            if cell is None:
                continue
            sums = np.asarray(cell["sums"])
            tau = float(tau_of_sums(sums.sum(0, keepdims=True))[0])
            interval = prompt_interval(sums, tau_of_sums)
            text = ""
            if own is not None and head != served:
                own_sums = np.asarray(own["sums"])
                gap = tau - float(tau_of_sums(own_sums.sum(0, keepdims=True))[0])
                paired = paired_interval(sums, own_sums, tau_of_sums)
                text = f"{gap:+.3f} [{paired.low:+.3f}, {paired.high:+.3f}]"
            rates = " ".join(f"{x:.3f}" for x in sums[:, 1:].sum(0) / sums[:, 0].sum())
            verdicts = [
                "passed" if cell["rungs"][name]["passed"] else "FAILED" for name in ("P2", "P3")
            ]
            lines.append(
                f"| {served} | {head} | {tau:.3f} [{interval.low:.3f}, {interval.high:.3f}] | "
                f"{text} | {rates} | {' | '.join(verdicts)} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cells that are not in the file yet; it is replaced after each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m mtp_train.studies.quantised")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args(arguments)
    settings, configs = StudySettings(), {path.name: read_run(path) for path in given.runs}
    cells: dict[str, Any] = read_json(given.out)["cells"] if given.out.is_file() else {}
    for served, config in configs.items():
        missing = [path for path in given.runs if f"{path.name}:{served}" not in cells]
        if not missing:
            continue
        set_threads(config.runtime.num_threads)
        tokenizer = load_tokenizer(config.target, target_directory(config.target))
        chosen = evaluation_prompts("mtbench", tokenizer, settings.prompts)
        prompts = [prompt.prompt_ids for prompt in chosen]
        with tempfile.TemporaryDirectory(prefix="mtp-cells-") as folder:
            base = open_subject(config, missing[0] / "head", device=torch.device("cpu"))
            fingerprint = base.target(base.runtime_dtype).fingerprint
            for path in missing:
                bound = Path(folder) / path.name
                bind_head(path / "head", bound, fingerprint=fingerprint)
                is_own = path.name == served
                cell = measure_cell(base.with_head(bound), prompts, settings, first=is_own)
                cells[f"{path.name}:{served}"] = cell
                write_json_atomic(given.out, {"settings": vars(settings), "cells": cells})
                logger.info("%s on %s: measured", path.name, served)
    logger.info("%s", describe(cells, list(configs)))


if __name__ == "__main__":
    main()

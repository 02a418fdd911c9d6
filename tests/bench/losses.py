"""`python -m tests.bench.losses`: one head, trained with each loss on the same features.

Measures tau in the runtime: T = 0 with arg-max drafts, T = 1 with sampled drafts and rejection, on
first turns of MT-Bench at K = 3. Prints a Markdown table and writes `losses-u<K>.json` below
`--root` after every head. Anything after `--` changes the recipe, as in `mtp train`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import hydra
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from data_prep.evaluation import evaluation_prompts
from mtp_train.app import CONF_DIR
from mtp_train.config import Config, LossKind
from mtp_train.distributed import init_process_group
from mtp_train.run_dir import write_json_atomic
from mtp_train.settings import load_config
from mtp_train.train_loop import Trainer
from mtp_train.trainer import open_inputs
from mtp_train.validate.measure import Measured, Prompts, measure_acceptance
from runtime.config import EngineConfig
from runtime.cpu import best_dtype, set_threads
from runtime.head_spec import load_head
from runtime.models.heads import build_head
from runtime.models.loader import Target, load_target

K, NEW_TOKENS, SEED = 3, 128, 1
MODES = (
    ("T = 0, arg-max", 0.0, EngineConfig()),
    ("T = 1, sampled", 1.0, EngineConfig(verify="rejection", draft_mode="sampled")),
)


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    base = _config(options)
    set_threads(base.runtime.num_threads)
    group = init_process_group(device="cpu")
    target = load_target("smollm2-135m-instruct", dtype=best_dtype(), device=torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [prompt.prompt_ids for prompt in evaluation_prompts("mtbench", tokenizer)]
    prompts = prompts[:: max(1, len(prompts) // options.prompts)]
    inputs, _ = open_inputs(base, group=group)
    normalisers: dict[int, torch.Tensor] = {}  # the target's: the same for every loss
    rows = []
    for kind in options.kinds:
        config = replace(
            base,
            run=replace(base.run, name=f"losses-{kind}-u{options.unroll}"),
            loss=replace(base.loss, kind=kind),
        )
        trainer = Trainer(config, inputs, group=group)
        trainer._target_lse = normalisers
        trainer.train()
        measured = _measure(target, trainer.head_dir, prompts)
        rows.append({"kind": kind, "unroll": options.unroll, "steps": options.steps} | measured)
        write_json_atomic(options.root / f"losses-u{options.unroll}.json", rows)
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(_table(rows))
    group.close()
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.losses", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="token set of the features")
    parser.add_argument("--features", type=Path, required=True, help="feature store to share")
    parser.add_argument("--root", type=Path, default=Path("runs/bench"))
    parser.add_argument("--kinds", nargs="+", choices=get_args(LossKind), default=[])
    parser.add_argument("--steps", type=int, default=200, help="of 1,024 tokens")
    parser.add_argument("--unroll", type=int, default=1, help="steps K of the unrolled loss")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("overrides", nargs="*", help="settings, as in loss.sub_vocab_size=8192")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds or list(get_args(LossKind))
    return options


def _config(options: argparse.Namespace) -> Config:
    settings = [
        "experiment=long",
        "run.name=losses",
        f"run.root={options.root}",
        f"data.path={options.data}",
        f"features.path={options.features}",
        f"loss.num_unroll_steps={options.unroll}",
        f"trainer.max_steps={options.steps}",
        "trainer.validate_every=0",
        "trainer.wandb=disabled",
        "trainer.tensorboard=false",
        *options.overrides,
    ]
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        raw = hydra.compose(config_name="mtp_train", overrides=settings)
    values: Any = OmegaConf.to_container(raw, resolve=True)
    return load_config(values)


def _measure(target: Target, head_dir: Path, prompts: Prompts) -> dict[str, Any]:
    spec, tensors = load_head(head_dir)
    head = build_head(spec, tensors, target.model)
    figures: dict[str, Any] = {}
    for name, temperature, engine in MODES:
        found = measure_acceptance(
            target,
            head,
            prompts,
            k=K,
            max_tokens=NEW_TOKENS,
            temperature=temperature,
            engine_config=replace(engine, max_running=16),
            prompt_set="mtbench",
            seed=SEED,
        )
        figures[name] = _figures(found)
    return figures


def _figures(found: Measured) -> dict[str, Any]:
    return {
        "tau": found.acceptance.tau,
        "low": found.tau_interval.low,
        "high": found.tau_interval.high,
        "rates": list(found.acceptance.rates),
        "drafts": found.acceptance.num_drafts,
        "prompts": found.num_prompts,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    heads = [head for name, _, _ in MODES for head in (f"τ, {name}", "per position")]
    lines = [f"| loss | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for row in rows:
        cells = []
        for name, _, _ in MODES:
            found = row[name]
            cells.append(f"{found['tau']:.3f} [{found['low']:.3f}, {found['high']:.3f}]")
            cells.append(", ".join(f"{rate:.3f}" for rate in found["rates"]))
        lines.append(f"| `{row['kind']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

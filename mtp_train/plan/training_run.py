"""A short training run in a process of its own, to be measured: `mtp train` as it is, on a token
set and features of random values.

A process of its own, because what a heap or a kernel cache has kept stays in memory: nothing that
ran before may count. Lengths differ from row to row, as they do in a store, for kernels and heap
depend on how many shapes there are.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from data_prep.token_set import FINGERPRINT_FILE, VERSION, TokenRow, TokenSetWriter, write_json
from mtp_train import resident
from mtp_train.config import Config, RunConfig, TrainerConfig
from mtp_train.distributed import init_process_group, run_alone
from mtp_train.events import read_events
from mtp_train.features.manifest import Fingerprint
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.features.writer import FeatureWriter, finish_store, recover_store
from mtp_train.phases import PhaseSeconds
from mtp_train.plan.facts import TargetFacts, plan_head_spec
from mtp_train.plan.step_cost import Rows
from mtp_train.run_dir import write_json_atomic
from runtime.models.loader import fingerprint_target

_MODULE = "mtp_train.plan.training_run"
_RESULT_NAME = "peak.json"
_SETTINGS_NAME = "settings.yaml"
_WARM_STEPS = 3
_ROW_SPREAD = 0.5  # lengths lie within this share of the asked-for one


@dataclass(frozen=True)
class MeasuredRun:
    """Medians of a step, and the most bytes that the process held (0: not known)."""

    phases: PhaseSeconds
    num_tokens: int  # of a step
    num_steps: int
    peak_bytes: float


def measure_training(
    config: Config, facts: TargetFacts, rows: Rows, *, num_tokens: int, num_steps: int
) -> MeasuredRun:
    """Train ``num_steps`` steps of ``num_tokens`` tokens with the head and loss of ``config``.

    Everything is written below a passing folder. Raises :class:`StageRefusedError` with the last
    words of a process that failed.
    """
    from mtp_train.app import dump_config

    trainer = TrainerConfig(
        max_steps=num_steps,
        tokens_per_step=num_tokens,
        dtype=config.trainer.dtype,
        attention=config.trainer.attention,
        activation_checkpointing=config.trainer.activation_checkpointing,
        validate_every=0,
        checkpoint_every=10 * num_steps,
        wandb="disabled",
        tensorboard=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings = replace(
            config,
            run=RunConfig(name="calibration", root=folder),
            data=replace(config.data, path=str(root / "data")),
            features=replace(config.features, path=str(root / "features")),
            trainer=trainer,
        )
        _write_inputs(settings, facts, rows, num_tokens=num_tokens * num_steps)
        (root / _SETTINGS_NAME).write_text(dump_config(settings))
        run_alone(_MODULE, folder, work="the calibration's training")
        steps = list(read_events(root / "calibration" / "events.jsonl", event="step"))
        peak = json.loads((root / _RESULT_NAME).read_text())["peak_bytes"]
    steps = steps[_WARM_STEPS:]
    phases = {
        name: statistics.median(float(step["seconds"][name]) for step in steps)
        for name in asdict(PhaseSeconds())
    }
    tokens = round(statistics.median(int(step["num_tokens"]) for step in steps))
    return MeasuredRun(PhaseSeconds(**phases), tokens, num_steps, float(peak))


def _write_inputs(config: Config, facts: TargetFacts, rows: Rows, *, num_tokens: int) -> None:
    """Token set and store where ``config`` looks for them. What tokens and states are does not
    matter to time or memory.
    """
    data, spec = Path(config.data.path), plan_head_spec(facts, config.head)
    train, validation = TokenSetWriter(), TokenSetWriter()
    fingerprint = Fingerprint(
        fingerprint_target(
            target_directory(config.target), cache_dir=cache_directory(config.target)
        ),
        "plan",
        "plan",
        facts.hidden_size,
        config.features.codec,
        layer_ids=spec.layer_ids,
    )
    store = Path(config.features.path) / "train"
    recover_store(store, fingerprint)
    generator = torch.Generator().manual_seed(0)
    with FeatureWriter(
        store,
        fingerprint=fingerprint,
        shard_tokens=config.features.shard_tokens,
        max_quarantined=0,
    ) as writer:
        for row in _random_rows(rows, num_tokens, facts.vocab_size, generator):
            train.append(row)
            hidden_TD = torch.randn(len(row.input_ids), facts.hidden_size, generator=generator)
            layers_TE = None
            if spec.layer_ids:
                shape = (len(row.input_ids), len(spec.layer_ids) * facts.hidden_size)
                layers_TE = torch.randn(shape, generator=generator)
            writer.add(row.sample_id, row.input_ids, row.loss_mask, hidden_TD, layers_TE)
    finish_store(store)
    data.mkdir()
    content = {}
    for split, rows_of in (("train", train), ("validation", validation)):
        content[split] = rows_of.content_hash
        rows_of.write(data / split)
    write_json(
        data / FINGERPRINT_FILE,
        {"version": VERSION, "inputs": {"plan": "calibration"}, "content": content},
    )


def _random_rows(
    rows: Rows, num_tokens: int, vocab_size: int, generator: torch.Generator
) -> Iterator[TokenRow]:
    spread = round(_ROW_SPREAD * rows.num_tokens)
    share = rows.num_answer_tokens / rows.num_tokens
    made = 0
    while made < num_tokens:
        more = int(torch.randint(-spread, spread + 1, (), generator=generator))
        length = max(4, rows.num_tokens + more)
        ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        prompt = length - round(share * length)
        mask = (False,) * prompt + (True,) * (length - prompt)
        yield TokenRow(str(made), "random", tuple(ids), mask)
        made += length


def _train(place: Path) -> None:
    """The process's work: the training stage, and the most memory that it took."""
    import yaml

    from mtp_train.settings import load_config
    from mtp_train.trainer import run

    config = load_config(yaml.safe_load((place / _SETTINGS_NAME).read_text()))
    group = init_process_group(device=config.target.device)
    run(config, group=group)
    write_json_atomic(place / _RESULT_NAME, {"peak_bytes": _peak(group.device)})
    group.close()


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resident.peak()) if resident.is_known() else 0.0


if __name__ == "__main__":
    _train(Path(sys.argv[1]))

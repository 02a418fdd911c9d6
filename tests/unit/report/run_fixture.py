"""A finished run's records, written by hand: small, complete, and full of hostile text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> & "quoted" \'single\''
SECRET = "the merger is called Operation Walrus"  # customer text that must not leak
K = 3


def write_run(root: Path, *, passed: bool = True, lower_end: float = 1.08) -> Path:
    """Every file that the report reads, below ``root``; returns ``root``.

    ``lower_end``: of the interval of the best cell's speed-up.
    """
    (root / "head").mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text(
        json.dumps(  # JSON is YAML
            {
                "run": {"name": root.name, "root": str(root.parent)},
                "target": {"path": f"/models/{HOSTILE.partition('/')[0]}my-llama"},
                "data": {"sources": ["/private/chats.jsonl"], "path": ""},
                "trainer": {"learning_rate": 0.002, "epochs": 3},
                "validate": {"k": K, "min_drafts": 3000, "sets": ["mtbench", "humaneval"]},
                "seed": 1234,
            }
        )
    )
    _write(root / "parity.json", parity(passed=passed, lower_end=lower_end))
    _write(root / "samples.json", samples())
    _write(root / "versions.json", versions())
    _write(root / "data" / "statistics.json", statistics())
    _write(root / "export" / "mimo" / "export.json", export())
    for split, tokens in (("train", 900), ("validation", 100)):
        _write(root / "features" / split / "manifest.json", manifest(tokens))
    events_file = root / "events.jsonl"
    events_file.write_text("".join(json.dumps(event) + "\n" for event in events()))
    return root


def parity(*, passed: bool = True, lower_end: float = 1.08) -> dict[str, Any]:
    """``parity.json`` of a ladder with all rungs."""
    rungs = {
        f"P{number}": {
            "passed": passed or number != 2,
            "figures": {"float32_steps": 264, "nested": {"max_gap": 4.2e-05}},
            "bounds": {"nested": {"max_gap": 1e-4}, "float32_steps_that_differ": 0},
            "note": f"6 sequences {HOSTILE}",
            "seconds": 11.1,
        }
        for number in range(7)
    }
    rungs["P3"]["figures"] = {
        "bfloat16_drafts": 6491,
        "bfloat16_training": [0.6, 0.5, 0.4],
        "bfloat16_runtime": [0.59, 0.51, 0.4],
        "bfloat16_gap": [0.01, -0.01, 0.0],
        "bfloat16_gap_interval": [[0.0, 0.02], [-0.02, 0.0], [-0.03, 0.03]],
        "bfloat16_training_tau": 2.021,
        "bfloat16_training_tau_interval": [1.995, 2.047],
        "bfloat16_undecided": [2],
    }
    rungs["P5"]["figures"] = {
        "target_kv_bytes_per_token": 23040,
        "draft_kv_bytes_per_token": 768,
    }
    rungs["P6"]["figures"] |= {
        "engine": "vllm 0.32.0",
        "sets": served(),
        "inputs": {"head": "ab" * 32},
    }
    return {
        "passed": passed,
        "target": "4362fad31bd45956d2794297323cb875",
        "head": "elsewhere",
        "head_sha256": {},
        "rungs": rungs,
        "acceptance": [
            acceptance("mtbench", [0.62], drafts=6906),
            acceptance("mtbench", [0.59, 0.3, 0.12], drafts=6491),
            acceptance("humaneval", [0.71, 0.48, 0.3], drafts=3300),
        ],
        "speed": [
            speed(batch, k, value, lower_end if batch == 1 and k == 1 else value - 0.08)
            for batch, k, value in (
                (1, 1, 1.31),
                (1, 3, 1.22),
                (4, 1, 1.12),
                (4, 3, 0.97),
                (16, 1, 0.91),
                (16, 3, 0.62),
            )
        ]
        + [speed(1, 1, 1.28, 1.2, context_len=512)],
        "breakdown": [
            breakdown(dimension, label, prompt_set, tau)
            for dimension, prompt_set, labels in (
                ("task", "mtbench", ("writing", "coding", "math", HOSTILE)),
                ("task", "humaneval", ("humaneval",)),
                ("context", "mtbench", ("0–128 tokens", "128–256 tokens")),
                ("token_kind", "mtbench", ("chat", "code")),
            )
            for tau, label in zip((1.9, 2.2, 2.05, 1.7), labels, strict=False)
        ],
    }


def acceptance(prompt_set: str, rates: list[float], *, drafts: int) -> dict[str, Any]:
    accepted = [round(rate * drafts) for rate in rates]
    tau = 1 + sum(accepted) / drafts
    before = [1.0, *rates]
    return {
        "prompt_set": prompt_set,
        "k": len(rates),
        "temperature": 0.0,
        "draft_mode": "argmax",
        "prompts": 80,
        "max_tokens": 128,
        "drafts": drafts,
        "accepted": accepted,
        "tau": tau,
        "tau_interval": [tau - 0.03, tau + 0.03],
        "tau_level": 0.95,
        "rates": rates,
        "rate_intervals": [[rate - 0.02, rate + 0.02] for rate in rates],
        "conditional_rates": [a / b for a, b in zip(rates, before, strict=False)],
    }


def served() -> list[dict[str, Any]]:
    """P6's rows: an engine's own counters."""
    row = {"set": "mtbench", "prompts": 80}
    return [
        row | {"dtype": "float32", "k": 1, "drafts_served": 700, "accepted_served": [434]},
        row
        | {
            "dtype": "bfloat16",
            "k": 3,
            "drafts_served": 6480,
            "accepted_served": [3810, 1950, 780],
            "tau": 2.004,
            "tau_served": 2.009,
            "tau_served_interval": [1.981, 2.037],
        },
    ]


def speed(
    batch_size: int, k: int, value: float, low: float, *, context_len: int = 0
) -> dict[str, Any]:
    plain = {
        "tokens_per_s": 86.8,
        "inter_token_p50_ms": 11.3,
        "inter_token_p99_ms": 15.1,
        "first_token_ms": 31.3,
    }
    return {
        "prompt_set": "mtbench" + (f"/context{context_len}" if context_len else ""),
        "batch_size": batch_size,
        "context_len": context_len,
        "k": k,
        "speedup": value,
        "low": low,
        "high": value + 0.08,
        "level": 0.95,
        "groups": 8,
        "repeats": 2,
        "emitted_per_step": 1.6,
        "predicted": value * 0.97,
        "model_error": -0.03,
        "c": 0.12,
        "v": 0.1,
        **{name: number * 1.2 for name, number in plain.items()},
        "plain": plain,
    }


def breakdown(dimension: str, label: str, prompt_set: str, tau: float) -> dict[str, Any]:
    return {
        "dimension": dimension,
        "label": label,
        "prompt_set": prompt_set,
        "k": K,
        "temperature": 0.0,
        "drafts": 812,
        "accepted": [500, 240, 90],
        "rates": [0.616, 0.296, 0.111],
        "tau": tau,
        "tau_interval": [tau - 0.1, tau + 0.1],
        "prompts": 10,
    }


def samples() -> dict[str, Any]:
    pieces: list[dict[str, Any]] = [{"text": "The", "by": "target"}]
    pieces += [{"text": f" word{j}", "by": "draft", "position": j} for j in (1, 2, 3)]
    pieces += [{"text": HOSTILE, "by": "target"}, {"text": SECRET, "by": "draft", "position": 1}]
    pieces += [{"text": "\n\nx = 1\u202e", "by": "target"}, {"text": "", "by": "target"}]
    sample = {"prompt_set": "mtbench", "category": "writing", "tau": 1.9, "tokens": pieces}
    row = [{"text": HOSTILE, "mask": False}, {"text": SECRET, "mask": True}]
    return {
        "k": K,
        "samples": [{**sample, "prompt": f"{HOSTILE} {SECRET}"}] * 3,
        "training_row": {"sample_id": "ab" * 16, "tokens": row},
    }


def versions() -> dict[str, Any]:
    machine = {
        "processor": "AMD EPYC",
        "cores": 2,
        "memory_bytes": 25_000_000_000,
        "system": "Linux x86_64",
        "python": "3.11.7",
    }
    return {
        stage: {
            "packages": {"torch": version, "numpy": "2.4.6"},
            "git": {"commit": "6923871c58c569b1", "dirty": stage == "train"},
            "machine": machine,
        }
        for stage, version in (("data", "2.13.0"), ("train", "2.14.0"))
    }


def statistics() -> dict[str, Any]:
    split = {
        "num_rows": 942,
        "num_tokens": 249954,
        "num_masked_tokens": 183738,
        "num_cut_off": 3,
        "row_lens": {"p50": 274, "p90": 421, "p99": 547, "max": 693},
    }
    rejects = {"token_budget": 81_234, "answer_too_long": 338}
    return {"splits": {"train": split, "validation": split}, "rejects": rejects}


def export() -> dict[str, Any]:
    return {
        "format": "mimo",
        "tensors": {"model.embed_tokens.weight": "00"},
        "commands": {"vllm": "vllm serve TARGET --speculative-config '{\"model\": HEAD}'"},
    }


def manifest(num_tokens: int) -> dict[str, Any]:
    shard = {
        "name": "shard-00.safetensors",
        "sha256": "00",
        "num_bytes": 585 * num_tokens,
        "sample_ids": ["a"],
        "lengths": [num_tokens],
        "mask_hashes": ["00000000"],
        "quarantined": [{"sample_id": "b", "num_rows": 5, "num_bad_rows": 1}],
        "p0": {
            "num_samples": 2,
            "num_rows": 64,
            "dtype": "bfloat16",
            "comparisons": [],
            "codec_mean_kl": 0.0043,
        },
    }
    fingerprint = {
        "target_weights": "00",
        "tokenizer": "00",
        "chat_template": "00",
        "hidden_size": 576,
        "codec": "fp8_e4m3",
        "hidden_state": "g: post-final-norm",
        "layer_ids": [],
        "settings": [],
    }
    return {"format_version": 1, "fingerprint": fingerprint, "shards": [shard]}


def events() -> list[dict[str, Any]]:
    """A run that was killed at step 60, resumed after step 50, and skipped one step."""
    found: list[dict[str, Any]] = []

    def add(minute: float, stage: str, event: str, **fields: Any) -> None:
        clock = f"2026-01-01T{int(minute) // 60:02d}:{int(minute) % 60:02d}:00.000+00:00"
        found.append({"time": clock, "stage": stage, "event": event, **fields})

    add(0, "data", "stage_started", world_size=1, seed=1)
    add(1, "data", "stage_finished", wall_s=60.0)
    add(1, "precompute", "stage_started", world_size=2, seed=1)
    add(3, "precompute", "split_finished", split="train", num_quarantined=1, num_tokens=900)
    add(3, "precompute", "stage_finished", wall_s=120.0)
    for first, last in ((0, 60), (50, 100)):
        add(4 + first / 10, "train", "stage_started", world_size=1, seed=1)
        add(4 + first / 10, "train", "start", step=first, total_steps=100)
        for step in range(first + 1, last + 1):
            loss = 4 + 10 / step + (100 if step > 50 and last == 60 else 0)
            add(4 + step / 10, "train", "step", step=step, loss=loss, tokens_per_s=2500.0)
            if step % 25 == 0:
                rates = [0.3 + step / 400, 0.1 + step / 800, 0.05]
                add(
                    4 + step / 10,
                    "train",
                    "validation",
                    step=step,
                    loss=loss + 0.2,
                    tau=1 + sum(rates),
                    rates=rates,
                    num_drafts=2214,
                    num_prompts=28,
                    is_best=step != 75,
                )
    add(14, "train", "skipped_step", step=88, run=1)
    add(14, "train", "endpoint_retry", attempt=2, answer=SECRET, loss="nan")
    add(15, "train", "end", step=100, updates=99, skipped=1)
    add(15, "train", "stage_finished", wall_s=660.0)
    return found


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))

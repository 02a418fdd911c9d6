"""`python -m tests.bench [name …]`: run benchmarks, print a table, write `runs/bench/results.json`.

Results of benchmarks that were not asked for are kept in the file.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from mtp_train.console import make_table
from mtp_train.distributed import init_process_group
from mtp_train.run_dir import write_json_atomic
from runtime.cpu import best_dtype, set_threads
from runtime.models.loader import load_target
from tests.bench import data_wait, decode, dump, host, loss, spec, train, tree, unroll, verify, vllm
from tests.bench.harness import BenchResult, NotHereError

RESULTS = Path("runs/bench/results.json")


def main(names: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING)
    set_threads(0)
    group = init_process_group(device="cpu")
    target = load_target("smollm2-135m-instruct", dtype=best_dtype(), device=torch.device("cpu"))
    benches: dict[str, Callable[[], BenchResult]] = {
        "decode_b1": lambda: decode.run(target, batch=1),
        "decode_b16": lambda: decode.run(target, batch=16),
        "decode_b16_vllm": lambda: vllm.run(target, batch=16),
        "verify_4": lambda: verify.run(target, rows=4),
        "dump_sharegpt": lambda: dump.run(target),
        "train_mtp_k1": lambda: train.run(target, group, num_steps=1, hot=False),
        "train_mtp_k1_hot": lambda: train.run(target, group, num_steps=1, hot=True),
        "train_mtp_k3": lambda: train.run(target, group, num_steps=3, hot=False),
        "train_mtp_k3_hot": lambda: train.run(target, group, num_steps=3, hot=True),
        "data_wait": lambda: data_wait.run(group),
        "loss_memory": loss.run,
        "spec_b1_k1": lambda: spec.run(target, k=1),
        "spec_b1_k2": lambda: spec.run(target, k=2),
        "spec_b1_k3": lambda: spec.run(target, k=3),
        "host_plain_b1": lambda: host.run(target, batch=1, k=0),
        "host_plain_b16": lambda: host.run(target, batch=16, k=0),
        "host_mtp1_b1": lambda: host.run(target, batch=1, k=1),
        "host_mtp1_b16": lambda: host.run(target, batch=16, k=1),
        "spec_b1_hot_k1": lambda: spec.run(target, k=1, hot=True),
        "spec_b1_hot_k2": lambda: spec.run(target, k=2, hot=True),
        "spec_b1_hot_k3": lambda: spec.run(target, k=3, hot=True),
        "spec_b1_tree3": lambda: spec.run(target, k=1, tree_nodes=3),
        "spec_b1_hot_tree3": lambda: spec.run(target, k=1, tree_nodes=3, hot=True),
        "spec_b1_hot_tree4": lambda: spec.run(target, k=2, tree_nodes=4, hot=True),
    }
    for backend, context in itertools.product(tree.BACKENDS, tree.CONTEXTS):
        benches[f"tree_{backend}_{context}"] = functools.partial(
            tree.run, target, backend=backend, context=context
        )
    for steps in unroll.STEPS:
        benches[f"unroll_k{steps}"] = functools.partial(unroll.run_steps, steps)
    for length in unroll.LENGTHS:
        benches[f"unroll_{length // 1024}k"] = functools.partial(unroll.run_length, length)
    unknown = [name for name in names if name not in benches]
    if unknown:
        sys.stderr.write(f"unknown benchmark {unknown[0]}; there are: {', '.join(benches)}\n")
        return 2
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    results = {row["name"]: row for row in kept}
    console, left_out = Console(), 0
    for name in names or list(benches):
        with console.status(name):
            try:
                results[name] = benches[name]().to_dict()
            except NotHereError as error:
                console.print(f"{name}: left out, {error}", markup=False)
                left_out += 1
                continue
        write_json_atomic(RESULTS, list(results.values()))
    console.print(make_table("benchmarks", COLUMNS, [_row(row) for row in results.values()]))
    group.close()
    return 1 if names and left_out else 0


COLUMNS = ("name", "ours", "peer", "ratio", "limit", "share", "unit", "note")


def _row(row: dict[str, object]) -> tuple[str, ...]:
    def number(key: str) -> str:
        value = row[key]
        return f"{value:.4g}" if isinstance(value, float) else "–"

    numbers = (number(key) for key in ("ours", "peer", "ratio", "limit", "share_of_limit"))
    return (str(row["name"]), *numbers, str(row["unit"]), str(row["note"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

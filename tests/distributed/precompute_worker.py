"""Runs dumps in forked processes, some of which kill themselves, and reports what each did.

Importing takes seconds and a dump of a tiny model a fraction of one, so this process imports
everything, computes nothing (forking is safe then), and forks every rank of every run.
Argument: a JSON file ``{"target", "data", "cases": {name: [{"world_size", "tensor_parallel",
"die_at"}, …]}}``; the runs of a case share a run directory beside the file. ``die_at``: null, or
``[rank, point, n]``: that rank gets SIGKILL when ``point`` is reached for the n-th time, the other
ranks right after.

Points: ``add`` (a sample was computed), ``staged`` (before the rename of a shard), ``renamed``
(after it, before its record), ``torn`` (half of the record is written), ``recorded``, ``merging``
(before the final manifest), ``merged`` (before the parts are removed).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM  # noqa: F401  (imported before forking)

from mtp_train import precompute
from mtp_train.distributed import init_process_group
from mtp_train.features import manifest, workbench, writer  # noqa: F401
from runtime.engine import Engine  # noqa: F401
from tests.distributed.ranks import torchrun_environment
from tests.unit.features.targets import make_config


def install_killer(point: str, count: int) -> None:
    hits = 0

    def hit() -> None:
        nonlocal hits
        hits += 1
        if hits == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str, only: Callable[[Any], bool] = lambda _: True) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if only(arguments[0]):
                hit()
            return original(*arguments, **options)

        setattr(owner, name, wrapped)

    original_append = manifest.append_part

    def torn(path: Path, rank: int, record: manifest.ShardRecord) -> None:
        original_append(path, rank, record)
        file = path / f"part-{rank:05d}.jsonl"
        if hits == count - 1:
            os.truncate(file, file.stat().st_size - 30)
        hit()

    def recorded(path: Path, rank: int, record: manifest.ShardRecord) -> None:
        original_append(path, rank, record)
        hit()

    if point == "add":
        before(writer.FeatureWriter, "add")
    elif point == "staged":
        before(os, "replace", lambda source: "shard-" in str(source))
    elif point == "renamed":
        before(writer, "append_part")
    elif point == "torn":
        writer.append_part = torn
    elif point == "recorded":
        writer.append_part = recorded
    elif point == "merging":
        before(precompute, "finish_store")
    elif point == "merged":
        before(writer, "part_files", lambda path: bool(list(path.glob("part-*"))))
    else:
        raise ValueError(point)


def dump(root: Path, plan: dict[str, Any], rank: int, run: dict[str, Any], port: int) -> None:
    """The life of one forked rank."""
    world_size = run["world_size"]
    if world_size > 1:
        os.environ |= torchrun_environment(rank, world_size, port)
    if run["die_at"] and run["die_at"][0] == rank:
        install_killer(*run["die_at"][1:])
    group = init_process_group(device="cpu", timeout_s=60)
    config = make_config(
        root, Path(plan["target"]), Path(plan["data"]), tensor_parallel=run["tensor_parallel"]
    )
    shared = str(root.parent / "cache")  # the kernels are compiled once for all runs
    config = dataclasses.replace(
        config, target=dataclasses.replace(config.target, cache_dir=shared)
    )
    report = precompute.run(config, group=group)
    if rank == 0:
        (root / "computed").write_text(json.dumps([split.num_computed for split in report.splits]))
    group.close()


def fork_rank(*arguments: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        dump(*arguments)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def run_all(root: Path, plan: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Fork all ranks of one run; a death takes the others along, as torchrun does."""
    (root / "computed").unlink(missing_ok=True)
    port = free_port()
    pids = [fork_rank(root, plan, rank, run, port) for rank in range(run["world_size"])]
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)
    store = root / "test" / "features" / "train"
    computed = root / "computed"
    return {
        "codes": [codes[pid] for pid in pids],
        "computed": json.loads(computed.read_text()) if computed.is_file() else None,
        "shards": len(list(store.glob("shard-*"))),
        "has_manifest": (store / manifest.MANIFEST_NAME).is_file(),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    plan_file = Path(sys.argv[1])
    plan = json.loads(plan_file.read_text())
    outcomes = {}
    for name, runs in plan["cases"].items():
        root = plan_file.parent / name
        root.mkdir()
        outcomes[name] = [run_all(root, plan, run) for run in runs]
    (plan_file.parent / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()

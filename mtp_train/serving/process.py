"""A serving engine in an environment of the user's, started for one job and gone after it.

The environment is named by its interpreter. What runs there is ``vllm_worker.py``, by path; nothing
of this package has to be installed beside the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train.run_dir import read_json
from mtp_train.serving.job import (
    DraftCounts,
    EngineLayout,
    Served,
    ServedPrompt,
    ServingError,
    ServingJob,
    counts_from,
)

WORKER = Path(__file__).with_name("vllm_worker.py")
_TAIL_LINES = 15


def find_python(python: str) -> Path:
    """The interpreter that ``engine.python`` names: a path, or a command on ``PATH``."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ServingError(
            "reach",
            f"engine.python={python}: no such interpreter; name the python of the environment in "
            "which vLLM is installed, as in engine.python=.venv-vllm/bin/python",
        )
    return Path(os.path.abspath(found))  # not resolved: a venv's python is a link


def serve_in_process(
    job: ServingJob,
    *,
    python: Path,
    layout: EngineLayout,
    num_threads: int = 0,
    timeout_s: float = 3600.0,
    llm_args: Mapping[str, Any] | None = None,
    log_file: Path | None = None,
    worker: Path = WORKER,
) -> Served:
    """Serve ``job`` with the vLLM of ``python``'s environment.

    ``llm_args``: further arguments of ``vllm.LLM``. ``log_file`` keeps what the engine printed.
    Raises :class:`ServingError` with the engine's own words when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="mtp-serve-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        own_log = log_file or Path(folder, "engine.log")
        own_log.parent.mkdir(parents=True, exist_ok=True)
        job_file.write_text(json.dumps(job_content(job, layout, llm_args or {})))
        code = _run(
            [str(python), str(worker), str(job_file), str(result_file)],
            environment=engine_environment(num_threads),
            log_file=own_log,
            timeout_s=timeout_s,
        )
        if not result_file.is_file():
            raise ServingError("load", f"{python}: ended with {code}: {tail(own_log)}")
        return read_result(read_json(result_file), job)


def job_content(
    job: ServingJob, layout: EngineLayout, llm_args: Mapping[str, Any]
) -> dict[str, Any]:
    """The worker's job file. Every group is prefilled in one step and decodes together."""
    return {
        "target": str(job.target.resolve()),
        "head": str(job.head.resolve()),
        "dtype": job.dtype,
        "k": job.k,
        "method": layout.method,
        "hf_overrides": dict(layout.hf_overrides),
        "max_model_len": job.max_model_len,
        "max_num_seqs": max(len(group) for group in job.groups),
        "max_num_batched_tokens": max(
            2048, *(sum(len(prompt) for prompt in group) + 1 for group in job.groups)
        ),
        "max_tokens": job.max_tokens,
        "stop_token_ids": list(job.stop_token_ids),
        "groups": job.groups,
        "llm_args": dict(llm_args),
    }


def read_result(raw: Mapping[str, Any], job: ServingJob) -> Served:
    """A :class:`Served` out of the worker's result. Raises :class:`ServingError`."""
    if "error" in raw:
        raise ServingError(raw["error"]["stage"], raw["error"]["message"])
    prompts = tuple(_read_prompt(record, job.k) for record in raw["prompts"])
    if len(prompts) != len(job.prompts):
        raise ServingError(
            "decode", f"{len(prompts)} answers came back for {len(job.prompts)} prompts"
        )
    clipped = sum(
        drafted != job.k
        for record in raw["prompts"]
        for drafted in record.get("drafted_per_step", ())
    )
    return Served(
        engine="vllm",
        version=str(raw["version"]),
        k=job.k,
        dtype=job.dtype,
        prompts=prompts,
        counters=counts_from(raw["counters"]),
        warm_up=counts_from(raw["warm_up"]),
        attribution=raw["attribution"],
        clipped_steps=clipped,
        load_s=float(raw["load_s"]),
        decode_s=float(raw["decode_s"]),
    )


def _read_prompt(record: Mapping[str, Any], k: int) -> ServedPrompt:
    steps = record.get("accepted_per_step")
    if steps is not None:
        counts = DraftCounts.of_steps(steps, k)
    else:
        counts = counts_from(record["counters"]) if "counters" in record else DraftCounts.none(k)
    return ServedPrompt(
        output_ids=tuple(record["output_ids"]),
        finish_reason=str(record["finish_reason"]),
        counts=counts,
        accepted_per_step=None if steps is None else tuple(steps),
    )


def engine_environment(num_threads: int) -> dict[str, str]:
    """Ours, without what is meant for our own interpreter."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def _run(
    command: list[str], *, environment: Mapping[str, str], log_file: Path, timeout_s: float
) -> int:
    """Run to the end in a process group of its own, so that nothing of the engine stays behind."""
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServingError(
                "decode", f"not done after engine.timeout_s={timeout_s:g}: {tail(log_file)}"
            ) from error
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the engine's processes (its workers outlive it when it is killed)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log_file: Path) -> str:
    """The last lines that the engine printed."""
    lines = log_file.read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:]) or "it printed nothing"

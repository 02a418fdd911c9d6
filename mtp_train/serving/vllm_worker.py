"""Runs in the user's own vLLM environment: serves one target with one exported head, and counts.

Started by path (``PYTHON vllm_worker.py JOB.json RESULT.json``), so it may import nothing but the
standard library and vLLM, and talks JSON. One process serves one dtype and one K. It prints what
vLLM prints and always leaves a result behind: ``{"error": {"stage", "message"}}`` when it failed.

Job: ``target``, ``head`` (directories), ``dtype``, ``k`` (0: no head), ``method``,
``hf_overrides``, ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``, ``max_tokens``,
``stop_token_ids``, ``groups`` (lists of prompts as token ids; a group is served together and ends
before the next one starts), ``llm_args`` (further arguments of ``vllm.LLM``).

Result: ``version``, ``attribution``, ``warm_up`` (counters before the first prompt), ``counters``
(of the prompts alone), ``prompts`` (in job order: ``output_ids``, ``finish_reason`` and either
``accepted_per_step``/``drafted_per_step`` or ``counters``), ``load_s``, ``decode_s``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# The first with the counters per position and MTP heads in a directory of their own.
OLDEST = (0, 10)
PER_REQUEST = "per_request_spec_decode_metrics"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # errors come with their own words, one process to end
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class WorkerError(Exception):
    """What went wrong, and where: ``stage`` is import, load or decode."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


def main(job_file: str, result_file: str) -> int:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    try:
        result = serve(job)
    except WorkerError as error:
        result = {"error": {"stage": error.stage, "message": str(error)}}
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 1 if "error" in result else 0


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Load, serve every group, count. Raises :class:`WorkerError`."""
    vllm = import_vllm()
    started = time.monotonic()
    arguments = engine_arguments(job, supports_per_request(vllm))
    try:
        llm = vllm.LLM(**arguments)
    except Exception as error:  # whatever vLLM says is what the user has to read
        raise WorkerError("load", f"{type(error).__name__}: {error}") from error
    loaded = time.monotonic()
    try:
        served = serve_groups(vllm, llm, job, per_request=arguments.get(PER_REQUEST) == "detailed")
    except Exception as error:
        raise WorkerError("decode", f"{type(error).__name__}: {error}") from error
    return {
        "version": vllm.__version__,
        **served,
        "load_s": loaded - started,
        "decode_s": time.monotonic() - loaded,
    }


def import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise WorkerError(
            "import", f"{sys.executable} cannot import vllm ({type(error).__name__}: {error})"
        ) from error
    numbers = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and (0, 0) < numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise WorkerError("import", f"vLLM {vllm.__version__}: at least {oldest} is needed")
    return vllm


def supports_per_request(vllm: Any) -> bool:
    """Whether this vLLM can say of each request what was accepted in each step."""
    return PER_REQUEST in getattr(vllm.EngineArgs, "__dataclass_fields__", {})


def engine_arguments(job: dict[str, Any], per_request: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; nothing in them changes what is computed but dtype and head."""
    arguments: dict[str, Any] = {
        "model": job["target"],
        "dtype": job["dtype"],
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job["max_num_seqs"],
        "max_num_batched_tokens": job["max_num_batched_tokens"],
        "enforce_eager": True,
        "enable_prefix_caching": False,  # a cached prefix skips rows of the head's first forward
        "disable_log_stats": False,
        "generation_config": "vllm",  # sampling comes from the job alone
        "seed": 0,
    }
    if job["hf_overrides"]:
        arguments["hf_overrides"] = job["hf_overrides"]
    if job["k"]:
        arguments["speculative_config"] = {
            "method": job["method"],
            "model": job["head"],
            "num_speculative_tokens": job["k"],
        }
        if per_request:
            arguments[PER_REQUEST] = "detailed"
    return arguments | job["llm_args"]


def serve_groups(vllm: Any, llm: Any, job: dict[str, Any], *, per_request: bool) -> dict[str, Any]:
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_token_ids"],
        ignore_eos=True,  # the list above says where to stop
        detokenize=False,
    )
    groups = job["groups"]
    if job["k"] and not per_request:
        groups = [[prompt] for group in groups for prompt in group]
    first = before = read_counters(llm.get_metrics(), job["k"])
    prompts = []
    for group in groups:
        inputs = [{"prompt_token_ids": prompt} for prompt in group]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        after = read_counters(llm.get_metrics(), job["k"])
        for output in outputs:
            record = describe_output(output, per_request=per_request)
            if job["k"] and not per_request:
                record["counters"] = subtract(after, before)
            prompts.append(record)
        before = after
    return {
        "attribution": "request" if per_request or not job["k"] else "one_at_a_time",
        "warm_up": first,
        "counters": subtract(before, first),
        "prompts": prompts,
    }


def describe_output(output: Any, *, per_request: bool) -> dict[str, Any]:
    completion = output.outputs[0]
    record = {
        "output_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if per_request:  # None: this request never drafted
        metrics = completion.spec_decode_metrics
        record["accepted_per_step"] = list(metrics.per_step_accepted) if metrics else []
        record["drafted_per_step"] = list(metrics.per_step_drafted) if metrics else []
    return record


def read_counters(metrics: Any, k: int) -> dict[str, Any]:
    """``{"drafts", "accepted"}`` out of ``LLM.get_metrics()``, summed over engines."""
    drafts, accepted = 0, [0] * k
    for metric in metrics:
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for position, value in enumerate(metric.values[:k]):
                accepted[position] += int(value)
    return {"drafts": drafts, "accepted": accepted}


def subtract(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(after["accepted"], before["accepted"], strict=True)
    return {
        "drafts": after["drafts"] - before["drafts"],
        "accepted": [a - b for a, b in pairs],
    }


def prepare_process() -> None:
    """Settings that vLLM reads while it is imported; what the user has set stays."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    prepare_process()
    sys.exit(main(*sys.argv[1:3]))

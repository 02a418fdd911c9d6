"""Runs in the user's own vLLM environment: residual streams of given rows, as safetensors files.

Started by path (``PYTHON states_worker.py JOB.json``), so it may import nothing but the standard
library and vLLM. Reads one JSON line per batch (``{"sequences": [[ids]]}``), answers with one
(``{"files": [...]}``, in order, or ``{"error": {"stage", "message"}}``); the first line out says
that it has loaded (``{"version"}``). What vLLM prints goes to standard error.

Job: ``target``, ``dtype``, ``layer_ids`` (of the streams; the number of layers is the last one's,
before the final norm), ``max_model_len``, ``max_num_batched_tokens``, ``folder``, ``llm_args``.

A file holds ``hidden_states`` ``[T, len(layer_ids), D]`` and ``token_ids`` ``[T]``.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import sys
from typing import Any

CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
METHOD = "extract_hidden_states"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class WorkerError(Exception):
    """What went wrong, and where: ``stage`` is import, load or decode."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


def main(job_file: str) -> int:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        vllm, llm = load(job)
        say({"version": vllm.__version__})
        states = States(vllm, llm)
        for line in sys.stdin:
            say({"files": states.write(json.loads(line)["sequences"])})
    except WorkerError as error:
        say({"error": {"stage": error.stage, "message": str(error)}})
        return 1
    return 0


def load(job: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM and its ``LLM``. Raises :class:`WorkerError`."""
    try:
        import vllm
    except ImportError as error:
        raise WorkerError(
            "import", f"{sys.executable} cannot import vllm ({type(error).__name__}: {error})"
        ) from error
    if importlib.util.find_spec(CONNECTOR_MODULE) is None:
        raise WorkerError(
            "import", f"vLLM {vllm.__version__} has no {METHOD}; 0.32 has, a newer one is needed"
        )
    from vllm.platforms import current_platform

    arguments = engine_arguments(job, on_cpu=current_platform.is_cpu())
    try:
        return vllm, vllm.LLM(**arguments)
    except Exception as error:  # whatever vLLM says is what the user has to read
        raise WorkerError("load", f"{type(error).__name__}: {error}") from error


def engine_arguments(job: dict[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; on a CPU the connector of ours, elsewhere vLLM's own."""
    connector: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": job["folder"]},
    }
    if on_cpu:
        connector["kv_connector"] = "HostStatesConnector"
        connector["kv_connector_module_path"] = "host_states_connector"
        connector["kv_connector_extra_config"]["use_synchronization_lock"] = False
    arguments: dict[str, Any] = {
        "model": job["target"],
        "dtype": job["dtype"],
        "max_model_len": job["max_model_len"],
        "max_num_batched_tokens": job["max_num_batched_tokens"],
        "enforce_eager": True,
        "enable_prefix_caching": False,  # rows of a cached prefix are not computed, nor extracted
        "generation_config": "vllm",
        "seed": 0,
        "speculative_config": {
            "method": METHOD,
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": job["layer_ids"]}
            },
        },
        "kv_transfer_config": connector,
    }
    return arguments | job["llm_args"]


class States:
    """Writes the streams of sequences. A request's file is written in the step that follows its
    end, so that every batch is followed by a request of one token, whose file is removed later.
    """

    def __init__(self, vllm: Any, llm: Any) -> None:
        self._llm = llm
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._flushed = ""

    def write(self, sequences: list[list[int]]) -> list[str]:
        """The file of every sequence. Raises :class:`WorkerError`."""
        try:
            outputs = self._generate(sequences)
            flush = self._generate([sequences[0][:1]])[0]
        except Exception as error:
            raise WorkerError("decode", f"{type(error).__name__}: {error}") from error
        files = [_file_of(output) for output in outputs]
        for output, file in zip(outputs, files, strict=True):
            if output.num_cached_tokens:
                raise WorkerError(
                    "decode",
                    f"{output.num_cached_tokens} tokens of a row came from the prefix cache, whose "
                    "states are not the row's; leave engine.args.enable_prefix_caching out",
                )
            _wait_until_written(file)
        _remove(self._flushed)
        self._flushed = _file_of(flush)
        return files

    def _generate(self, sequences: list[list[int]]) -> Any:
        inputs = [{"prompt_token_ids": ids} for ids in sequences]
        return self._llm.generate(inputs, self._sampling, use_tqdm=False)


def _file_of(output: Any) -> str:
    return str((output.kv_transfer_params or {}).get("hidden_states_path", ""))


def _wait_until_written(file: str) -> None:
    """The writer holds a lock beside the file until it is whole."""
    lock = file + ".lock"
    if os.path.exists(lock):
        with open(lock, encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
        os.remove(lock)
    if not os.path.isfile(file):
        raise WorkerError("decode", f"vLLM named {file or 'no file'} and did not write it")


def _remove(file: str) -> None:
    for path in (file, file + ".lock"):
        if file and os.path.exists(path):
            os.remove(path)


def prepare_process() -> None:
    """Settings that vLLM reads while it is imported; what the user has set stays. Of this folder
    only the plugin can be imported, by vLLM's own processes as well.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    plugin = os.path.join(here, "vllm_plugin")
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path.append(plugin)
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (known, plugin)))
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    prepare_process()
    sys.exit(main(*sys.argv[1:2]))

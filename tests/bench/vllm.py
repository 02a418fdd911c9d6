"""`decode_b16_vllm`: 16 requests at once against vLLM on the same CPU, prompts and precision.

vLLM decodes in a process of its own, from its own environment (`MTP_BENCH_VLLM` names the
interpreter, default `.venv-vllm/bin/python`), in turns with ours; each side is idle meanwhile. It
runs as it comes, compiled, without prefix caching; a round includes its prefill, as ours does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.request import Request, SamplingParams
from tests.bench.decode import NEW_TOKENS, bench_prompts, step_limit
from tests.bench.harness import BenchResult, NotHereError, interleave

DEFAULT_PYTHON = Path(".venv-vllm/bin/python")
MAX_MODEL_LEN = 512


class VllmPeer:
    """A running `vllm_peer.py`; leave the context to end it."""

    def __init__(self, target: Target, *, batch: int) -> None:
        python = Path(os.environ.get("MTP_BENCH_VLLM", DEFAULT_PYTHON))
        if not python.is_file():
            raise NotHereError(
                f"MTP_BENCH_VLLM={python}: no such interpreter; make interop installs vLLM"
            )
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed on leaving
        self._process = subprocess.Popen(
            [
                str(python),
                str(Path(__file__).with_name("vllm_peer.py")),
                str(target.path),
                str(target.model.dtype).removeprefix("torch."),
                str(batch),
                str(MAX_MODEL_LEN),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> VllmPeer:
        self.version = self._read()["version"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def decode(self, prompts: list[list[int]]) -> None:
        assert self._process.stdin is not None
        job = {"prompts": prompts, "max_tokens": NEW_TOKENS}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        tokens = self._read()["tokens"]
        assert tokens == len(prompts) * NEW_TOKENS, f"vLLM decoded {tokens} tokens"

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"vLLM ended:\n{self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(target: Target, *, batch: int) -> BenchResult:
    """Tokens per second of ``batch`` MT-Bench prompts decoded together, prefill included."""
    prompts = bench_prompts(target, batch=batch)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(str(i), tuple(ids), sampling) for i, ids in enumerate(prompts)]
    engine = Engine(target.model, config=EngineConfig(max_running=batch, num_pages=512))
    limit = step_limit(target, prompts)
    with VllmPeer(target, batch=batch) as peer:
        for _ in range(2):  # vLLM compiles while it meets its first sizes
            peer.decode(prompts)
        timing = interleave(
            lambda: engine.generate(requests) and None,
            lambda: peer.decode(prompts),
            lambda: batch * limit(),
            units=batch * NEW_TOKENS,
            rounds=7,
        )
        version = peer.version
    name = f"decode_b{batch}_vllm"
    return BenchResult.of(
        name,
        timing,
        units=batch * NEW_TOKENS,
        note=f"vLLM {version}, compiled, a process of its own",
    )

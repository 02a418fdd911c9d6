"""`mtp bench` starts a real vLLM with and without a head, and takes hidden states from it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from data_prep.config import DataConfig
from data_prep.evaluation import evaluation_prompts
from data_prep.ids import hash_token_ids
from mtp_train import precompute
from mtp_train.bench.command import run_bench
from mtp_train.config import BenchConfig, Config, FeaturesConfig, RunConfig, ServingConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.features.manifest import load_manifest
from mtp_train.features.target import load_tokenizer, target_directory
from mtp_train.run_dir import read_json
from mtp_train.serving.process import engine_environment
from runtime.config import EngineConfig
from runtime.cpu import set_threads
from tests.interop.engines import SMOLLM2, Bench, make_bench, trained_head, vllm_python
from tests.interop.fitted_head import write_fitted_head

pytestmark = [
    pytest.mark.interop,
    pytest.mark.real,
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]

_SMALL_ENGINE = (("enforce_eager", "true"), ("max_model_len", "1024"), ("max_num_seqs", "8"))
_VALIDATE = (
    "import json, sys; from vllm.v1.spec_decode.dynamic.utils import "
    "build_dynamic_sd_schedule_lookup as f; print(json.dumps(f(json.loads(sys.argv[1]), 8, 3)))"
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    set_threads(1)
    folder = tmp_path_factory.mktemp("bench")
    return make_bench(folder, trained_head() or write_fitted_head(folder, SMOLLM2))


def make_config(tmp_path: Path, **sections: Any) -> Config:
    return dataclasses.replace(
        Config(
            run=RunConfig("bench", root=str(tmp_path)),
            target=dataclasses.replace(SMOLLM2, dtype="float32"),
            data=DataConfig(path=str(tmp_path / "data")),
            runtime=EngineConfig(num_threads=1),
            engine=ServingConfig(
                python=str(vllm_python()), dtype="float32", timeout_s=900, args=_SMALL_ENGINE
            ),
        ),
        **sections,
    )


def test_vllm_is_measured_with_and_without_a_head(bench: Bench, tmp_path: Path) -> None:
    settings = BenchConfig(
        heads=("none", str(bench.export_dir)),
        k=(1, 3),
        concurrency=(1, 4),
        num_prompts=8,
        max_tokens=32,
        rounds=1,
    )
    assert run_bench(make_config(tmp_path, bench=settings)) == 0
    found = read_json(tmp_path / "bench" / "bench.json")
    cells = {(cell["contestant"], cell["concurrency"]): cell for cell in found["cells"]}
    assert set(cells) == {(n, c) for n in ("none", "mimo K=1", "mimo K=3") for c in (1, 4)}
    for (name, _), cell in cells.items():
        assert cell["num_failed"] == 0
        assert cell["tokens_per_s"]["value"] > 0
        if name == "none":
            assert cell["no_tau"] == "it does not speculate"
        else:
            assert 1 < cell["tau"] <= 1 + cell["k"]
            assert len(cell["acceptance"]) == cell["k"]
            assert cell["equal_texts"] >= 0.9  # fp32
    (schedule,) = found["schedules"]
    ranges = schedule["ranges"]
    lookup = subprocess.run(
        [str(vllm_python()), "-c", _VALIDATE, json.dumps(ranges)],
        env=engine_environment(1),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    dense = json.loads(lookup)
    assert [dense[size] for size in (1, 4)] == [ranges[0][2], ranges[-1][2]]


def test_vllms_states_pass_p0(tmp_path: Path) -> None:
    """Real text: random ids move fp32 log-probabilities by up to 8e-4 between correct engines."""
    tokenizer = load_tokenizer(SMOLLM2, target_directory(SMOLLM2))
    prompts = [item.prompt_ids[:100] for item in evaluation_prompts("mtbench", tokenizer, 8)]
    for split, chosen in (("train", prompts[:6]), ("validation", prompts[6:])):
        rows = []
        for prompt in chosen:
            ids = list(prompt)
            mask = [position > 5 for position in range(len(ids))]
            rows.append({"sample_id": hash_token_ids(ids), "input_ids": ids, "loss_mask": mask})
        Dataset.from_list(rows).save_to_disk(str(tmp_path / "data" / split))
    config = make_config(
        tmp_path,
        features=FeaturesConfig(
            source="vllm", codec="fp32", p0_samples_per_shard=4, p0_max_logprob_gap=2e-4
        ),
    )
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, args=()))
    precompute.run(config, group=SingleProcessGroup(torch.device("cpu")))
    manifest = load_manifest(tmp_path / "bench" / "features" / "train")
    assert manifest.num_samples == 6
    figures = manifest.shards[0].p0
    assert figures is not None
    assert {item.name for item in figures.comparisons} == {"decode", "huggingface", "decode_error"}

"""Where the interop tests find vLLM, and what they serve in it: SmolLM2 with a head that accepts.

``make interop`` builds the environment; ``MTP_VLLM_PYTHON`` names another one. The head is that of
``runs/demo`` (``MTP_INTEROP_HEAD`` names another), where there is one, and else a fitted one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.evaluation import evaluation_prompts
from mtp_train.config import ExportFormat, TargetConfig
from mtp_train.export import write_export
from mtp_train.features.target import cache_directory, load_tokenizer, target_directory
from mtp_train.serving.job import Served, ServingJob
from mtp_train.serving.process import serve_in_process
from mtp_train.serving.target_scope import vllm_layout_for
from mtp_train.validate.served import EnginePair, serve_and_compare
from mtp_train.validate.subject import Subject
from runtime.config import EngineConfig
from runtime.request import Generation

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = TargetConfig("smollm2-135m-instruct")


def vllm_python() -> Path:
    """The interpreter of an environment with vLLM; it may not exist."""
    return Path(os.environ.get("MTP_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")


def trained_head() -> Path | None:
    """A trained head of SmolLM2, if there is one here."""
    head = Path(os.environ.get("MTP_INTEROP_HEAD") or ROOT / "runs" / "demo" / "head")
    return head if (head / "config.json").is_file() else None


@dataclass(frozen=True)
class Bench:
    """One export, and a few prompts to serve it with."""

    target_dir: Path
    export_dir: Path
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    num_threads: int = 1
    format: ExportFormat = "mimo"

    def subject(self, dtype: torch.dtype) -> Subject:
        return Subject(
            target_path=self.target_dir,
            head_path=self.export_dir,
            runtime_dtype=dtype,
            engine_config=EngineConfig(num_threads=self.num_threads, int8_grid="vllm"),
            cache_dir=cache_directory(SMOLLM2),
        )

    def serve(self, job: ServingJob, llm_args: Mapping[str, Any] | None = None) -> Served:
        return serve_in_process(
            job,
            python=vllm_python(),
            layout=vllm_layout_for(self.format, job.target),
            num_threads=self.num_threads,
            timeout_s=500,
            llm_args=llm_args,
        )

    def compare(
        self,
        *,
        k: int,
        dtype: torch.dtype = torch.float32,
        export_dir: Path | None = None,
        max_tokens: int = 48,
        max_running: int = 0,
        generations: Sequence[Generation] | None = None,
        llm_args: Mapping[str, Any] | None = None,
    ) -> EnginePair:
        """``export_dir``: the engine is given this one, and we keep ours."""

        def serve(job: ServingJob) -> Served:
            return self.serve(replace(job, head=export_dir) if export_dir else job, llm_args)

        return serve_and_compare(
            self.subject(dtype),
            self.prompts,
            k=k,
            dtype=dtype,
            max_tokens=max_tokens,
            serve=serve,
            max_running=max_running or len(self.prompts),
            generations=generations,
        )


def make_bench(folder: Path, head: Path, *, num_prompts: int = 8) -> Bench:
    """Export ``head`` into ``folder`` and take prompts of MT-Bench."""
    target_dir = target_directory(SMOLLM2)
    out = folder / "mimo"
    write_export(head, out, format="mimo", target_dir=target_dir, unvalidated=True)
    tokenizer = load_tokenizer(SMOLLM2, target_dir)
    prompts = evaluation_prompts("mtbench", tokenizer, num_prompts)
    return Bench(target_dir, out, tuple(prompt.prompt_ids for prompt in prompts))

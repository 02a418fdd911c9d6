"""Configuration of the inference runtime: frozen, validated once, no defaults elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionChoice = Literal["auto", "sdpa", "flashinfer"]
AttentionKernel = Literal["auto", "fa2", "fa3", "xqa"]
VerifyMode = Literal["greedy", "keyed", "rejection"]
DraftMode = Literal["argmax", "sampled"]


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one :class:`runtime.engine.Engine`.

    Lengths and capacities are in tokens. ``num_pages`` bounds K/V memory: target and draft each
    own a zeroed pool of ``num_pages * page_size`` slots. Dtype and device are the target's;
    ``attention`` and ``attention_kernel`` are read where a target is loaded.
    """

    num_threads: int = 0  # CPU threads; 0 = one per physical core
    page_size: int = 16
    num_pages: int = 1024
    max_running: int = 16  # requests decoded together
    max_model_len: int = 2048  # prompt + answer, per request
    max_batch_tokens: int = 1024  # rows of one forward; longer prompts are cut into chunks
    num_draft_tokens: int = 0  # K; 0 = plain decoding even when a head is loaded
    verify: VerifyMode = "keyed"
    draft_mode: DraftMode = "argmax"
    attention: AttentionChoice = "auto"  # on a GPU: FlashInfer where it can run, else SDPA
    attention_kernel: AttentionKernel = "auto"  # FlashInfer's; auto is FA3 on Hopper, else FA2
    cuda_graphs: bool = False  # decoding, verification and draft loop as recorded graphs
    check_integrity: bool = False  # test the page accounting after every step

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_running", "max_model_len", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"runtime.{name}={getattr(self, name)}: must be at least 1")
        for name in ("num_threads", "num_draft_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"runtime.{name}={getattr(self, name)}: must not be negative")
        if self.attention_kernel == "xqa" and self.page_size not in (16, 32, 64, 128):
            raise ValueError(
                f"runtime.page_size={self.page_size} with runtime.attention_kernel=xqa: it has "
                "pages of 16, 32, 64 or 128 slots"
            )
        if self.draft_mode == "sampled" and self.verify != "rejection":
            raise ValueError(
                f"runtime.draft_mode=sampled with runtime.verify={self.verify}: sampled drafts are "
                "only exact under verify=rejection (the q that was sampled from enters min(1, p/q))"
            )
        if self.max_batch_tokens < self.max_running * (self.num_draft_tokens + 1):
            raise ValueError(
                f"runtime.max_batch_tokens={self.max_batch_tokens}: one verification step needs "
                f"max_running * (num_draft_tokens + 1) = "
                f"{self.max_running * (self.num_draft_tokens + 1)} rows"
            )
        if self.max_model_len > self.num_pages * self.page_size:
            raise ValueError(
                f"runtime.max_model_len={self.max_model_len}: one request must fit into "
                f"num_pages * page_size = {self.num_pages * self.page_size} slots"
            )

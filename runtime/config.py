"""Configuration of the inference runtime: frozen, validated once, no defaults elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

AttentionChoice = Literal["auto", "sdpa", "flashinfer"]
AttentionKernel = Literal["auto", "fa2", "fa3", "xqa"]
StoredWeights = Literal["auto", "dense", "stored"]
KvCache = Literal["model", "fp8_e4m3"]
Int8Grid = Literal["library", "vllm"]
DraftLength = Literal["pinned", "measured"]
VerifyMode = Literal["greedy", "keyed", "rejection"]
DraftMode = Literal["argmax", "sampled"]
ScheduleName = Literal["auto", "mtp", "fixed_tree", "dynamic_tree", "draft_target"]
TREE_SCHEDULES: tuple[ScheduleName, ...] = ("fixed_tree", "dynamic_tree")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one :class:`runtime.engine.Engine`.

    Lengths and capacities are in tokens. ``num_pages`` bounds K/V memory: target and draft each
    own a zeroed pool of ``num_pages * page_size`` slots. Dtype and device are the target's;
    ``attention``, ``attention_kernel``, ``stored_weights``, ``int8_grid``, ``kv_cache`` and
    ``expert_parallel`` are read where a target is loaded.
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
    # of a quantised target: dense in the model's dtype, or in their stored width; auto: stored on a
    # GPU and where int8 inputs meet int8 weights
    stored_weights: StoredWeights = "auto"
    int8_grid: Int8Grid = "library"  # of rounded inputs: compressed-tensors' 127.5 steps, or 127
    kv_cache: KvCache = "model"  # the target's: in its dtype, or rounded to fp8 with a scale
    cuda_graphs: bool = False  # decoding, verification and draft loop as recorded graphs
    schedule: ScheduleName = "auto"  # auto: mtp for a head, draft_target for a whole model
    tree_nodes: int = 16  # drafted tokens that one pass of the target verifies
    tree_top_k: int = 4  # dynamic: expanded per level, and children of each
    tree_rates: tuple[float, ...] = (0.45, 0.1, 0.05, 0.04)  # fixed: how often rank r is right
    check_integrity: bool = False  # test the page accounting after every step
    draft_length: DraftLength = "pinned"  # measured: 0, 1 or K per step, whichever is fastest
    expert_parallel: bool = False  # several ranks: each has some experts whole, not columns of all
    micro_batch_halves: bool = False  # a head's chain is verified in halves that take turns

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "num_pages",
            "max_running",
            "max_model_len",
            "max_batch_tokens",
            "tree_nodes",
            "tree_top_k",
        ):
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
        if self.kv_cache == "fp8_e4m3" and self.attention == "flashinfer":
            raise ValueError(
                "runtime.kv_cache=fp8_e4m3 with runtime.attention=flashinfer: fp8 keys and values "
                "are read by SDPA; use runtime.attention=sdpa or auto"
            )
        if self.draft_mode == "sampled" and self.verify != "rejection":
            raise ValueError(
                f"runtime.draft_mode=sampled with runtime.verify={self.verify}: sampled drafts are "
                "only exact under verify=rejection (the q that was sampled from enters min(1, p/q))"
            )
        self._check_tree()
        if self.micro_batch_halves and (self.is_tree or self.cuda_graphs):
            other = f"schedule={self.schedule}" if self.is_tree else "cuda_graphs=true"
            raise ValueError(
                f"runtime.micro_batch_halves=true with runtime.{other}: halves are of chains, and "
                "are not recorded; use runtime.micro_batch_halves=false"
            )
        if self.max_batch_tokens < self.max_running * self.num_verify_rows:
            rows = "num_draft_tokens + 1" if not self.is_tree else "tree_nodes + 1"
            raise ValueError(
                f"runtime.max_batch_tokens={self.max_batch_tokens}: one verification step needs "
                f"max_running * ({rows}) = {self.max_running * self.num_verify_rows} rows"
            )
        if self.max_model_len + self.num_extra_slots > self.num_pages * self.page_size:
            extra = f" and {self.num_extra_slots} rows of a tree" if self.num_extra_slots else ""
            raise ValueError(
                f"runtime.max_model_len={self.max_model_len}: one request{extra} must fit into "
                f"num_pages * page_size = {self.num_pages * self.page_size} slots"
            )

    @property
    def is_tree(self) -> bool:
        """Whether a tree is drafted in the place of a chain; K is then its depth."""
        return self.schedule in TREE_SCHEDULES

    @property
    def num_verify_rows(self) -> int:
        """Rows per request of the target's verification pass."""
        return self.verify_rows(self.num_draft_tokens)

    @property
    def num_extra_slots(self) -> int:
        """K/V slots per request that a step writes behind its K + 1 positions."""
        return self.extra_slots(self.num_draft_tokens)

    def verify_rows(self, k: int) -> int:
        """As :attr:`num_verify_rows`, with another K."""
        return 1 + (self.tree_nodes if k and self.is_tree else k)

    def extra_slots(self, k: int) -> int:
        """As :attr:`num_extra_slots`, with another K. Only a tree has any: the target's rows or the
        head's, whichever are more.
        """
        if not k or not self.is_tree:
            return 0
        head_rows = (k - 1) * self.tree_top_k if self.schedule == "dynamic_tree" else 0
        # Near max_model_len K is clipped, to 1 at the least; the tree keeps its nodes.
        return max(0, max(self.tree_nodes + 1, head_rows) - 2)

    def _check_tree(self) -> None:
        if not self.is_tree:
            return
        if self.draft_length == "measured":
            raise ValueError(
                f"runtime.draft_length=measured with runtime.schedule={self.schedule}: lengths are "
                "chosen for chains; use draft_length=pinned"
            )
        if self.draft_mode == "sampled":
            raise ValueError(
                f"runtime.draft_mode=sampled with runtime.schedule={self.schedule}: the nodes "
                "of a tree are a deterministic top-k; use draft_mode=argmax"
            )
        rates = self.tree_rates
        is_falling = all(a >= b for a, b in itertools.pairwise(rates))
        if not rates or not is_falling or not all(0 < rate < 1 for rate in rates):
            raise ValueError(
                f"runtime.tree_rates={list(rates)}: give at least one number, each above 0 and "
                "below 1, none above the one before it"
            )

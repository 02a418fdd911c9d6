"""Configuration of the inference runtime: frozen, validated once, no defaults elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

VerifyMode = Literal["greedy", "keyed", "rejection"]
DraftMode = Literal["argmax", "sampled"]
TreeMode = Literal["none", "fixed", "dynamic"]


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one :class:`runtime.engine.Engine`.

    Lengths and capacities are in tokens. ``num_pages`` bounds K/V memory: target and draft each
    own a zeroed pool of ``num_pages * page_size`` slots. Dtype and device are the target's.
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
    draft_tree: TreeMode = "none"  # not "none": K is the tree's depth
    tree_nodes: int = 16  # drafted tokens that one pass of the target verifies
    tree_top_k: int = 4  # dynamic: expanded per level, and children of each
    tree_rates: tuple[float, ...] = (0.45, 0.1, 0.05, 0.04)  # fixed: how often rank r is right
    check_integrity: bool = False  # test the page accounting after every step

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
        if self.draft_mode == "sampled" and self.verify != "rejection":
            raise ValueError(
                f"runtime.draft_mode=sampled with runtime.verify={self.verify}: sampled drafts are "
                "only exact under verify=rejection (the q that was sampled from enters min(1, p/q))"
            )
        self._check_tree()
        if self.max_batch_tokens < self.max_running * self.num_verify_rows:
            rows = "num_draft_tokens + 1" if self.draft_tree == "none" else "tree_nodes + 1"
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
    def num_verify_rows(self) -> int:
        """Rows per request of the target's verification pass."""
        return self.verify_rows(self.num_draft_tokens)

    @property
    def num_extra_slots(self) -> int:
        """K/V slots per request that a step writes behind its K + 1 positions."""
        return self.extra_slots(self.num_draft_tokens)

    def verify_rows(self, k: int) -> int:
        """As :attr:`num_verify_rows`, with another K."""
        return 1 + (self.tree_nodes if k and self.draft_tree != "none" else k)

    def extra_slots(self, k: int) -> int:
        """As :attr:`num_extra_slots`, with another K. Only a tree has any: the target's rows or the
        head's, whichever are more.
        """
        if not k or self.draft_tree == "none":
            return 0
        head_rows = (k - 1) * self.tree_top_k if self.draft_tree == "dynamic" else 0
        return max(0, max(self.tree_nodes + 1, head_rows) - (k + 1))

    def _check_tree(self) -> None:
        if self.draft_tree == "none":
            return
        if self.draft_mode == "sampled":
            raise ValueError(
                f"runtime.draft_mode=sampled with runtime.draft_tree={self.draft_tree}: the nodes "
                "of a tree are a deterministic top-k; use draft_mode=argmax"
            )
        rates = self.tree_rates
        is_falling = all(a >= b for a, b in itertools.pairwise(rates))
        if not rates or not is_falling or not all(0 < rate < 1 for rate in rates):
            raise ValueError(
                f"runtime.tree_rates={list(rates)}: give at least one number, each above 0 and "
                "below 1, none above the one before it"
            )

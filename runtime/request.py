"""Requests, their sampling parameters, and what the engine gives back.

Invariant of a running request: ``committed <= written <= reserved`` (tokens whose target K/V is
valid and final; tokens with any K/V, speculative rows included; tokens with slots).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from runtime.config import EngineConfig

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    ``temperature=0`` is greedy; ``top_k=0``, ``top_p=1`` and ``min_p=0`` switch a filter off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False  # give the log-probability of every token of the answer

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be >= 0 (0 switches it off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r}: a stop string must have at least one character")


@dataclass(frozen=True)
class Request:
    """One prompt. ``request_id`` is unique within an engine while the request lives."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True)
class SpecStep:
    """One verification step of one request: K drafted ids, how many were accepted, ids emitted.

    Of a tree: the nodes in breadth-first order, ``tree_parents`` with the row of each one's parent
    (0: the last token before the draft; row i is node i - 1), and its greatest possible depth.
    """

    draft_ids: tuple[int, ...]
    num_accepted: int
    start: int  # index in output_ids of the first token this step emitted
    tree_parents: tuple[int, ...] = ()
    tree_depth: int = 0

    @property
    def k(self) -> int:
        """How many of the drafted tokens can be accepted at most."""
        return self.tree_depth if self.tree_parents else len(self.draft_ids)


@dataclass(frozen=True)
class Generation:
    """The finished request. ``output_ids`` is trimmed after EOS / stop / length.

    ``text`` (``None`` without a tokenizer) ends before a stop string, ``output_ids`` with the
    token that completed it. ``steps`` lists every verification step, counted *before* trimming
    (as vLLM counts). ``logprobs`` (``None`` unless asked for) are the output tokens' under the
    target itself: temperature 1, nothing filtered.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    steps: tuple[SpecStep, ...] = ()
    text: str | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class TokenEvent:
    """Tokens that one step gave one request.

    The first ``num_accepted`` of them were drafted, at positions 1, 2, … of the draft; the others
    are the target's own. ``step`` is the verification step, ``None`` where nothing was drafted.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None
    step: SpecStep | None = None


@dataclass(frozen=True)
class HiddenRows:
    """Target hidden states of one sequence: post-final-norm ``g``, one row per token.

    ``key`` is the request id (decoding) or the index as text (``forward_hidden``); ``hidden_TD`` is
    ``[len(token_ids), D]`` in the model's dtype on the engine's device. From decoding, the last
    sampled token has no row and is not in ``token_ids``. ``draft_TD`` (only from ``forward_draft``)
    is the head's own state for the same rows; its last row, which has no next token, is missing.
    ``layers_TE`` are the un-normed residual streams of the target's ``layer_ids``, side by side
    (``None`` where it gives none).
    """

    key: str
    token_ids: tuple[int, ...]
    hidden_TD: torch.Tensor = field(repr=False)
    draft_TD: torch.Tensor | None = field(default=None, repr=False)
    layers_TE: torch.Tensor | None = field(default=None, repr=False)


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class RequestState:
    """A request inside the engine. Lengths count tokens of ``prompt + output``.

    ``committed`` tokens have final target K/V; while decoding it is ``len(tokens) - 1``, for the
    last token has been sampled but not yet been processed. ``encode_only`` requests sample nothing.
    """

    request: Request
    tokens: list[int]
    arrival: int
    encode_only: bool = False
    captures_hidden: bool = False
    captures_draft: bool = False
    phase: Phase = Phase.WAITING
    row: int = -1
    committed: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    steps: list[SpecStep] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    draft_hidden: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)  # per step, on the device

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def take_hidden(self, length: int, *, width: int) -> HiddenRows:
        """The first ``length`` captured rows, of which ``width`` columns are ``g``; the state keeps
        none.
        """
        rows_TE = torch.cat(self.hidden)[:length] if self.hidden else torch.empty(0, width)
        hidden_TD, layers_TE = rows_TE, None
        if rows_TE.shape[1] > width:
            hidden_TD, layers_TE = (part.contiguous() for part in rows_TE.tensor_split([width], 1))
        draft_TD = torch.cat(self.draft_hidden)[: length - 1] if self.draft_hidden else None
        self.hidden.clear()
        self.draft_hidden.clear()
        ids = tuple(self.tokens[: hidden_TD.shape[0]])
        return HiddenRows(self.request.request_id, ids, hidden_TD, draft_TD, layers_TE)

    def take_logprobs(self) -> tuple[float, ...] | None:
        """Those of the output tokens; waits for the device. The state keeps none."""
        if not self.request.sampling.logprobs:
            return None
        values = torch.cat(self.logprobs).tolist() if self.logprobs else []
        self.logprobs.clear()
        return tuple(values[: len(self.output_ids)])

    def reset_for_recompute(self) -> None:
        """Forget everything that prefill rebuilds; keep the tokens and the step history."""
        self.phase, self.row, self.committed = Phase.WAITING, -1, 0
        self.hidden.clear()
        self.draft_hidden.clear()


def check_request(
    request: Request,
    *,
    config: EngineConfig,
    vocab_size: int,
    has_tokenizer: bool,
    encode_only: bool,
) -> None:
    """Raise ``ValueError`` saying what an engine of ``config`` cannot do with ``request``."""
    name, ids, limit = request.request_id, request.prompt_ids, config.max_model_len
    if not ids:
        raise ValueError(f"request {name!r}: prompt_ids is empty; at least one token is needed")
    longest = limit if encode_only else limit - 1
    if len(ids) > longest:
        raise ValueError(
            f"request {name!r}: prompt of {len(ids)} tokens; at most {longest} fit "
            f"(runtime.max_model_len={limit})"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(
            f"request {name!r}: token id {min(ids) if min(ids) < 0 else max(ids)} is outside "
            f"the vocabulary 0..{vocab_size - 1}"
        )
    sampling = request.sampling
    if sampling.stop and not has_tokenizer:
        raise ValueError(f"request {name!r}: stop strings need an engine with a tokenizer")
    if sampling.temperature > 0 and config.num_draft_tokens and config.verify == "greedy":
        raise ValueError(
            f"request {name!r}: temperature={sampling.temperature} under runtime.verify=greedy; "
            "use keyed or rejection"
        )

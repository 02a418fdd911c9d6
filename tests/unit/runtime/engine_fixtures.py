"""A tiny target with a small vocabulary (so that a random head is right now and then), engines over
it, stub drafts, and the from-scratch recompute that equal output cannot replace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtp_train.validate.recompute import draft_state_errors
from runtime.batch import ForwardBatch
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import EAGLE3_FIELDS, EAGLE_FIELDS, MEDUSA_FIELDS, HeadSpec, RopeSpec
from runtime.kv_cache import KVPool, SlotTable
from runtime.layer_parts import PLAIN_LAYER
from runtime.models.base import DraftModel, Model
from runtime.models.heads import build_head
from runtime.models.loader import Target, load_target
from runtime.request import Request, RequestState, SamplingParams
from tests.unit.runtime.model_fixtures import random_ids, save_model

VOCAB = 11
EOS = 2


def tiny_target(
    path: Path, *, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Target:
    save_model(path, family, seed=seed, vocab_size=VOCAB)
    return load_target(str(path), dtype=dtype, device=torch.device("cpu"))


def head_spec(target: Target, **overrides: Any) -> HeadSpec:
    """A head whose layer is of the target's kind, unless told :data:`PLAIN`."""
    config = target.config
    has_experts = config.has_experts(config.num_layers - 1)
    experts = replace(config.experts, dense_layers=()) if has_experts else None
    values: dict[str, Any] = {
        "kind": "mtp",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope": RopeSpec(theta=config.rope.theta),
        "norm_eps": config.norm_eps,
        "target_fingerprint": target.fingerprint,
        "layer_parts": config.layer_parts,
        "latent": config.latent,
        "experts": experts,
    }
    return HeadSpec(**{**values, **overrides})


PLAIN: dict[str, Any] = {"layer_parts": PLAIN_LAYER, "latent": None, "experts": None}


def random_head_tensors(spec: HeadSpec, *, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        if name == "draft_vocab_ids":
            continue
        if len(shape) == 1:
            tensors[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            tensors[name] = torch.randn(shape, generator=generator) * 0.3
    return tensors


EAGLE3: dict[str, Any] = {
    "kind": "eagle3",
    "layer_ids": (1,),  # the tiny target has two layers
    "recycle": "pre_norm",
    "fusion_norm": "each",
    **EAGLE3_FIELDS,
}

NARROW: dict[str, Any] = EAGLE3 | {
    "hidden_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "target_hidden_size": 32,
    "embedding": "own",
}

MEDUSA: dict[str, Any] = {
    "kind": "medusa",
    "num_blocks": 3,
    "projection_bias": True,
    **MEDUSA_FIELDS,
}

OTHER_HEADS: dict[str, dict[str, Any]] = {
    "eagle with a bias": {"kind": "eagle", "projection_bias": True, **EAGLE_FIELDS},
    "two layers": {"num_layers": 2},
    "eagle3": EAGLE3,
    "narrow eagle3": NARROW,
    "medusa": MEDUSA,
    "medusa with lm_heads": MEDUSA | {"lm_head": "own"},
}


def random_head(target: Target, *, seed: int = 1, **overrides: Any) -> DraftModel:
    spec = head_spec(target, **overrides)
    return build_head(spec, random_head_tensors(spec, seed=seed), target.model)


def make_engine(target: Target, draft: DraftModel | None = None, **overrides: Any) -> Engine:
    transfer = overrides.pop("transfer", None)
    tokenizer = overrides.pop("tokenizer", None)
    recorder = overrides.pop("recorder", None)
    values: dict[str, Any] = {
        "page_size": 16,
        "num_pages": 64,
        "max_running": 4,
        "max_model_len": 96,
        "max_batch_tokens": 64,
        "check_integrity": True,
    }
    values.update(overrides)
    return Engine(
        target.model,
        config=EngineConfig(**values),
        eos_token_ids=(EOS,),
        draft=draft,
        tokenizer=tokenizer,
        transfer=transfer,
        recorder=recorder,
    )


def make_requests(
    count: int = 5, *, seed: int = 0, max_tokens: int = 20, **sampling: Any
) -> list[Request]:
    """Prompts of very different lengths, among them one of a single token."""
    lengths = [1, 37, 5, 16, 23, 2, 17, 30]
    return [
        Request(
            f"r{index}",
            tuple(random_ids(lengths[index % 8], seed=seed * 100 + index, vocab_size=VOCAB)),
            SamplingParams(max_tokens=max_tokens, **{"seed": index, **sampling}),
        )
        for index in range(count)
    ]


class ByteTokenizer:
    """Token i is the letter 'a' + i: enough for stop strings."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(
            chr(ord("a") + token)
            for token in token_ids
            if not (skip_special_tokens and token == EOS)
        )


class Oracle(Model):
    """Knows the plain output; right where ``behaviour(position)`` says so, else wrong. No weights.

    Its state is (position, table row): the row at position p predicts token p + ``ahead`` of
    whoever holds the table row.
    """

    ahead: int

    def __init__(self, target: Target, answers: dict[str, list[int]], behaviour: Any) -> None:
        self.device, self.dtype = target.model.device, torch.float32
        self.group, self.width = target.model.group, 2
        self.vocab_size = target.model.vocab_size
        self.answers = answers
        self.behaviour = behaviour
        self.engine: Engine | None = None

    def new_pool(self, num_slots: int) -> KVPool:
        return KVPool(
            num_layers=0,
            num_slots=num_slots,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=self.device,
        )

    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        rows = torch.repeat_interleave(torch.tensor(batch.table_rows), torch.tensor(batch.q_lens))
        return torch.stack([batch.positions_N, rows], 1).float()

    def right_tokens(self, hidden_MD: torch.Tensor) -> list[tuple[int, int]]:
        """The predicted position and the right token of each row (0 behind the answer's end)."""
        assert self.engine is not None
        owners = {state.row: state for state in self.engine.scheduler.running}
        found = []
        for position, row in hidden_MD.long().tolist():
            answer = self.answers[owners[row].request.request_id]
            predicted = position + self.ahead
            found.append((predicted, answer[predicted] if predicted < len(answer) else 0))
        return found

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden_MD), self.vocab_size)
        for index, (position, token) in enumerate(self.right_tokens(hidden_MD)):
            is_right = self.behaviour(position)
            logits[index, token if is_right else (token + 1) % self.vocab_size] = 1.0
        return logits


class StubDraft(Oracle, DraftModel):
    """An oracle as a head, whose rows take the token behind their own."""

    ahead = 2

    def __init__(self, target: Target, answers: dict[str, list[int]], behaviour: Any) -> None:
        super().__init__(target, answers, behaviour)
        self.draft_vocab_size = self.vocab_size
        self.draft_vocab_ids = None


def run_stepwise(
    engine: Engine, requests: list[Request], *, late: bool = False, after_step: Any = None
) -> dict[str, list[int]]:
    """Drive the engine by hand; with ``late`` one request arrives every third step."""
    queue = list(requests)
    states: list[RequestState] = []
    if not late:
        states = [engine.add(request) for request in queue]
        queue = []
    count = 0
    while queue or engine.has_work:
        if queue and count % 3 == 0:
            states.append(engine.add(queue.pop(0)))
        engine.step()
        count += 1
        if after_step is not None:
            after_step(engine)
    return {state.request.request_id: state.output_ids for state in states}


def check_draft_state(engine: Engine, *, tolerance: float = 1e-4) -> int:
    """Draft K/V and relay state of every decoding request against a from-scratch recompute.

    Returns how many requests were checked. Raises ``AssertionError`` naming what differs.
    """
    checked = set()
    for item in draft_state_errors(engine):
        checked.add(item.request_id)
        assert item.error <= tolerance, f"{item.request_id}: {item.name} is off by {item.error:.2e}"
    return len(checked)

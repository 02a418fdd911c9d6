"""Tiny random targets, and EAGLE and Medusa heads trained for seconds on the targets' own answers,
so that a mistake in the arithmetic would change what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mtp_train.config import ExportFormat, HeadConfig
from mtp_train.export import write_export
from mtp_train.heads import build_training_head
from mtp_train.heads.init import OwnHead, initialise, make_head_spec
from mtp_train.packing import pack
from mtp_train.validate.unroll import HiddenSequence, lm_head_of
from runtime.cpu import set_threads
from runtime.engine import Engine
from runtime.head_spec import DraftVocab, HeadSpec, hash_vocab_ids, save_head
from runtime.models.loader import Target, load_target
from runtime.request import Request, SamplingParams
from tests.interop.engines import Bench
from tests.unit.cli.byte_target import byte_tokenizer
from tests.unit.runtime.engine_fixtures import EOS, make_engine
from tests.unit.runtime.model_fixtures import random_ids, save_model

VOCAB = 24
REDUCED = (0, 1, 3, 4, 6, 9, 10, 11, 13, 14, 16, 19, 20, 21, 23)
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "vocab_size": VOCAB,
    "initializer_range": 0.06,
}
_NUM_STEPS = 3
_EPOCHS = 60


@dataclass(frozen=True)
class TinyHead:
    """``num_layers`` of the target; ``ids``: the draft vocabulary, empty for all tokens;
    ``fields``: what of the head's contract is not as the target has it.
    """

    format: ExportFormat
    head: HeadConfig
    num_layers: int = 4
    family: str = "llama"
    ids: tuple[int, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def make_tiny_bench(path: Path, tiny: TinyHead) -> Bench:
    """Target, trained head and export below ``path``."""
    set_threads(1)
    torch.set_num_threads(1)
    save_model(path / "target", tiny.family, **_SIZES, num_hidden_layers=tiny.num_layers)
    byte_tokenizer().save_pretrained(path / "target")
    target = load_target(path / "target", dtype=torch.float32, device=torch.device("cpu"))
    ids_W = torch.tensor(tiny.ids or range(VOCAB))
    vocab = DraftVocab(len(ids_W), coverage=1.0, ids_sha256=hash_vocab_ids(ids_W))
    spec = make_head_spec(
        tiny.head,
        target.config,
        fingerprint=target.fingerprint,
        draft_vocab=vocab if tiny.ids else None,
    )
    spec = replace(spec, **tiny.fields)
    stored = load_file(path / "target" / "model.safetensors")
    tensors = initialise(
        spec,
        method="random",
        seed=1,
        initializer_range=0.06,
        num_target_layers=tiny.num_layers,
        read_target=stored.__getitem__,
        own_head=OwnHead(
            ids_W if tiny.ids else None, stored["lm_head.weight"][ids_W, : spec.hidden_size]
        ),
    )
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
    trained = train(spec, tensors, target, ids_W)
    save_head(path / "head", spec, trained)
    out = path / "out" / tiny.format
    write_export(
        path / "head", out, format=tiny.format, target_dir=path / "target", unvalidated=True
    )
    return Bench(path / "target", out, prompts(count=8, seed=50), format=tiny.format)


def prompts(*, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(random_ids(12 + i % 8, seed=seed + i, vocab_size=VOCAB)) for i in range(count)
    )


def train(
    spec: HeadSpec, tensors: dict[str, torch.Tensor], target: Target, ids_W: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Cross-entropy of the target's own next tokens over three unrolled steps."""
    head = build_training_head(spec, dtype=torch.float32)
    head.load_tensors(tensors)
    sequences = answers(target, spec)
    batch = pack(sequences, num_steps=_NUM_STEPS, every_row=True, of_layers=spec.reads_layers)
    column_V = torch.full((VOCAB,), -1)
    column_V[ids_W] = torch.arange(len(ids_W))
    labels = [
        torch.cat([_labels(sequence.input_ids, step, column_V) for sequence in sequences])
        for step in range(_NUM_STEPS)
    ]
    embedding_VD = target.model.embedding_VD.clone()
    target_lm_head = load_file(Path(target.path) / "model.safetensors")["lm_head.weight"]
    optimiser = torch.optim.Adam(head.parameters(), lr=2e-3)
    for _ in range(_EPOCHS):
        states = head(batch, embedding_VD)
        own = [head.get_parameter(name) for name in spec.own_lm_heads] or [target_lm_head]
        losses = [
            F.cross_entropy(state @ lm_head_of(own, step).t(), label, ignore_index=-1)
            for step, (state, label) in enumerate(zip(states, labels, strict=True))
        ]
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()
    return head.export_tensors()


def answers(target: Target, spec: HeadSpec) -> list[HiddenSequence]:
    """Greedy answers of the target with what the head reads of it."""
    requests = [
        Request(f"r{index}", prompt, SamplingParams(max_tokens=60))
        for index, prompt in enumerate(prompts(count=48, seed=500))
    ]
    engine = make_engine(target, max_model_len=128, num_pages=256)
    texts = [(*g.prompt_ids, *g.output_ids) for g in engine.generate(requests)]
    model = target.model.tapped(spec.layer_ids) if spec.layer_ids else target.model  # type: ignore[attr-defined]
    reading = Engine(model, config=engine.config, eos_token_ids=(EOS,))
    rows = {int(row.key): row for row in reading.forward_hidden(texts)}
    return [
        HiddenSequence(
            torch.tensor(text),
            rows[index].hidden_TD.clone(),
            _cloned(rows[index].layers_TE),
        )
        for index, text in enumerate(texts)
    ]


def _cloned(layers_TE: torch.Tensor | None) -> torch.Tensor | None:
    return None if layers_TE is None else layers_TE.clone()


def _labels(ids_T: torch.Tensor, step: int, column_V: torch.Tensor) -> torch.Tensor:
    """Columns of the tokens that rows of ``step`` predict; -1 for none."""
    known = column_V[ids_T[2 + step :]]
    return torch.cat((known, known.new_tensor([-1])))


def share_accepted(sums: Sequence[Sequence[int]]) -> float:
    """Of all drafted tokens."""
    drafts = sum(row[0] for row in sums)
    return sum(sum(row[1:]) for row in sums) / (drafts * (len(sums[0]) - 1))

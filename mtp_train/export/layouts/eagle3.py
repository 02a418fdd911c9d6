"""The EAGLE-3 layout that vLLM (``eagle3``) and SGLang (``EAGLE3``) both read.

Their head classes compute what our EAGLE-3 head does; ``config.json`` says which norms stand in
front of ``fc`` and which state is recycled. Not in any file: the embedding comes first in query,
key and value, position 0 keeps its embedding, rotary positions have no offset.

Choices that need a reason:

- ``d2t`` holds *offsets*: draft id ``i`` is token ``i + d2t[i]``. It is there only where the draft
  vocabulary is smaller than the target's: with one of the same size vLLM has no parameter for it.
- layer ids are written twice, as the two engines count: at the top level k, for the residual stream
  after k layers (vLLM), in ``eagle_config`` k - 1 (SGLang); or not at all where they are both
  engines' default, 2, N // 2, N - 3. vLLM sorts them, so the columns of ``fc`` ascend in k.
- ``lm_head`` and ``draft_vocab_size`` are always there: without the latter SGLang fails, without
  the former its ``lm_head`` is random.
- the embedding is a copy of the target's, which vLLM recognises and shares. It would do without,
  but for pipeline parallelism, where it shares nothing. A head narrower than its target has its
  own, and ``target_hidden_size`` is written, by which both engines size ``fc``. One of its own of
  the target's width vLLM keeps and SGLang replaces.
- the residual is the head's input as it is: SGLang has no other. With a single stream as wide as
  the head SGLang skips ``fc``.

Shape legend: V vocabulary, W draft vocabulary, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mtp_train.config import ExportFormat
from mtp_train.export.layouts.base import (
    TARGET_EMBEDDING,
    Layout,
    Matches,
    TargetFacts,
    host_tensors,
    refuse_differing,
    sizes_and_rope,
    swap_halves,
)
from runtime.head_spec import DRAFT_VOCAB_NAME, EMBEDDING_NAME, HeadSpec

OFFSETS_NAME = "d2t"
MASK_NAME = "t2d"
_JOINED_INPUTS = tuple(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")
# EAGLE3_FIELDS of runtime.head_spec fixes the others.
CARRIED: Mapping[str, Any] = MappingProxyType({"block": "llama"})


def default_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """What both engines read when a directory names no layers."""
    return 2, num_target_layers // 2, num_target_layers - 3


class Eagle3Layout(Layout):
    """One directory for vLLM and SGLang."""

    name: ClassVar[ExportFormat] = "eagle3"
    title = "EAGLE-3"
    kind = "eagle3"
    holds = "is one decoder layer over residual streams of the target, with its own lm_head"
    engines: ClassVar[tuple[str, ...]] = ("vllm", "sglang")
    sglang_algorithm = "EAGLE3"
    carries_draft_vocab = True
    reserved_in_paths = ("eagle-", "dflash", "dspark")
    copies = MappingProxyType({EMBEDDING_NAME: TARGET_EMBEDDING})

    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """A draft vocabulary that lists every token is none."""
        whole = spec.draft_vocab_size == spec.vocab_size
        return replace(spec, draft_vocab=None if whole else spec.draft_vocab)

    def copied(self, spec: HeadSpec) -> Mapping[str, str]:
        return self.copies if spec.embedding == "target" else {}

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        shapes = self.served_spec(spec).tensor_shapes()
        if shapes.pop(DRAFT_VOCAB_NAME, None) is not None:
            shapes[OFFSETS_NAME] = (spec.draft_vocab_size,)
            shapes[MASK_NAME] = (spec.vocab_size,)
        return shapes | {EMBEDDING_NAME: (spec.vocab_size, spec.hidden_size)}

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        written = host_tensors(tensors)
        ids_W = written.pop(DRAFT_VOCAB_NAME, None)
        if self.served_spec(spec).draft_vocab is not None:
            assert ids_W is not None, "a draft vocabulary without ids"
            written[OFFSETS_NAME] = to_offsets(ids_W)
            written[MASK_NAME] = to_mask(ids_W, vocab_size=spec.vocab_size)
        return written

    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        served = self.served_spec(spec)
        native = {n: written[n] for n in served.tensor_shapes() if n != DRAFT_VOCAB_NAME}
        if served.draft_vocab is not None:
            native[DRAFT_VOCAB_NAME] = to_ids(written[OFFSETS_NAME])
        return native

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": spec.draft_vocab_size,
            "num_aux_hidden_states": len(spec.layer_ids),
            "norm_before_residual": False,
            "norm_before_fc": spec.fusion_norm == "joined",
            "fc_norm": spec.fusion_norm == "each",
            "norm_output": spec.recycle == "post_norm",
            "attention_bias": False,
            "mlp_bias": False,
            **sizes_and_rope(spec, dtype=target.dtype),
        }
        if spec.target_hidden_size is not None:
            config["target_hidden_size"] = spec.target_hidden_size
        if spec.layer_ids != default_layer_ids(target.num_layers):
            config["eagle_aux_hidden_state_layer_ids"] = list(spec.layer_ids)
            before = [k - 1 for k in spec.layer_ids]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": before}
        return config

    def refuse_fields(self, spec: HeadSpec) -> None:
        if spec.residual != "standard":
            raise ValueError(
                f'head residual="{spec.residual}": SGLang\'s EAGLE-3 head has no normed residual, '
                "so one directory cannot serve both engines. Nearest: export.format=speculators "
                "(vLLM), or train with head.norm_before_residual=false"
            )
        if len(spec.layer_ids) < 2:
            raise ValueError(
                f"head layer_ids={list(spec.layer_ids)}: SGLang skips fc of a single residual "
                "stream as wide as the head. Nearest: export.format=speculators (vLLM), or train "
                "with two or more head.layer_ids"
            )
        if spec.embedding == "own" and spec.target_hidden_size is None:
            raise ValueError(
                'head embedding="own": SGLang puts the target\'s in its place where both are as '
                "wide. Nearest: export.format=speculators (vLLM)"
            )
        refuse_differing(spec, CARRIED, layout=self.name)

    def describe(self, spec: HeadSpec) -> str:
        streams = ", ".join(map(str, spec.layer_ids))
        served = self.served_spec(spec).draft_vocab
        ids = "" if served is None else "; `d2t` holds their ids as offsets, `t2d` marks them"
        embedding = "its own" if spec.embedding == "own" else "a copy of the target's"
        return (
            f"It reads the target's residual streams after layers {streams}, and drafts from "
            f"{spec.draft_vocab_size} tokens with an `lm_head` of its own{ids}. The embedding is "
            f"{embedding}."
        )

    def check_values(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor], *, source: str
    ) -> None:
        if self.served_spec(spec).draft_vocab is None:
            return
        for name, dtype in ((OFFSETS_NAME, torch.int64), (MASK_NAME, torch.bool)):
            if written[name].dtype != dtype:
                raise ValueError(f"{source}: tensor {name} is {written[name].dtype}, not {dtype}")
        offsets_W, mask_V = written[OFFSETS_NAME], written[MASK_NAME]
        if _marks(mask_V, to_ids(offsets_W)):
            return
        if _marks(mask_V, offsets_W):
            raise ValueError(
                f"{source}: tensor {OFFSETS_NAME} holds ids, not offsets: index i stands for token "
                f"i + {OFFSETS_NAME}[i]"
            )
        raise ValueError(
            f"{source}: tensor {MASK_NAME} does not mark the tokens that {OFFSETS_NAME} names"
        )

    def explain_change(self, name: str, tensor: torch.Tensor, matches: Matches) -> str:
        if name in _JOINED_INPUTS and matches(swap_halves(tensor)):
            return "has its column halves exchanged: the embedding comes first in this layout"
        return ""


def to_offsets(ids_W: torch.Tensor) -> torch.Tensor:
    """``d2t``, int64 ``[W]``: token ``ids_W[i]`` is ``i + d2t[i]``."""
    return ids_W - torch.arange(len(ids_W))


def to_ids(offsets_W: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`to_offsets`."""
    return offsets_W + torch.arange(len(offsets_W))


def to_mask(ids_W: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """``t2d``, bool ``[V]``: which tokens can be drafted."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool)
    mask_V[ids_W] = True
    return mask_V


def _marks(mask_V: torch.Tensor, ids_W: torch.Tensor) -> bool:
    size = len(mask_V)
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= size:
        return False
    return torch.equal(to_mask(ids_W, vocab_size=size), mask_V)

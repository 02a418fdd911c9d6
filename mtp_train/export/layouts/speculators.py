"""EAGLE-3 in the format of the ``speculators`` library, which vLLM reads too and SGLang does not.

The tensors are those of :mod:`mtp_train.export.layouts.eagle3`; ``config.json`` is the library's.
It has a normed residual, and its heads may read a single residual stream.

Choices that need a reason:

- layer ids are always written: the library counts the inputs of ``fc`` by them. vLLM 0.32 does not,
  where the block is Llama's; it takes ``num_aux_hidden_states`` and else three. So that stands
  among the block's keys, which vLLM passes on and the library leaves alone.
- ``norm_before_residual`` is always written: absent it is true to vLLM and false to the library.
- the verifier is the target's directory as it was named at the export: the library opens a head
  only together with it. The command lines name the target themselves, and then vLLM does not look.
"""

from __future__ import annotations

from typing import Any

from mtp_train.export.layouts.base import TargetFacts, refuse_differing, sizes_and_rope
from mtp_train.export.layouts.eagle3 import CARRIED, Eagle3Layout
from runtime.head_spec import HeadSpec

FORMAT_VERSION = "0.9.0"
PROPOSED_TOKENS = 3  # what vLLM drafts when nobody says how many


class SpeculatorsLayout(Eagle3Layout):
    """For vLLM, and for training on with the library."""

    name = "speculators"
    title = "speculators EAGLE-3"
    engines = ("vllm",)

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        block = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "num_aux_hidden_states": len(spec.layer_ids),
            "attention_bias": False,
            "mlp_bias": False,
            **sizes_and_rope(spec, dtype=target.dtype),
        }
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": PROPOSED_TOKENS,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": FORMAT_VERSION,
            "transformer_layer_config": block,
            "draft_vocab_size": spec.draft_vocab_size,
            "target_hidden_size": spec.target_hidden_size,
            "norm_before_residual": spec.residual == "normed",
            "norm_before_fc": spec.fusion_norm == "joined",
            "fc_norm": spec.fusion_norm == "each",
            "norm_output": spec.recycle == "post_norm",
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": list(spec.layer_ids),
            "tie_word_embeddings": False,
            "torch_dtype": target.dtype,
            "dtype": target.dtype,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": target.name, "architectures": []},
            },
        }

    def refuse_fields(self, spec: HeadSpec) -> None:
        refuse_differing(spec, CARRIED, layout=self.name)

"""Random targets and heads of real shapes, made on the device: no checkpoint, no network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.attention.base import AttentionBackend
from runtime.attention.choice import choose_gpu_backend
from runtime.attention.sdpa import SdpaBackend
from runtime.head_spec import HeadSpec, RopeSpec
from runtime.models.base import DraftModel
from runtime.models.config import ModelConfig
from runtime.models.heads import build_head
from runtime.models.llama import LlamaModel
from runtime.ops import TorchOps
from runtime.parallel import SingleProcessGroup


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="LlamaForCausalLM",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_position_embeddings=8192,
            rope=RopeSpec(theta=500000.0),
            norm_eps=1e-5,
            tie_word_embeddings=False,
        )

    @property
    def num_matrix_weights(self) -> int:
        """Weights that every token is multiplied with (the embedding is only looked up)."""
        shapes = self.config.tensor_shapes()
        return sum(
            shape[0] * shape[1]
            for name, shape in shapes.items()
            if len(shape) == 2 and "embed" not in name
        )

    def kv_bytes(self, num_tokens: int) -> int:
        """K and V of ``num_tokens`` tokens in bfloat16."""
        return num_tokens * self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "1b": Shape(2048, 8192, 16, 16, 4, 128, 128256),  # heads as in "8b": the same kernels
    "tiny": Shape(64, 128, 2, 4, 2, 16, 256),
}


def random_target(shape: Shape, *, device: torch.device, seed: int = 0) -> LlamaModel:
    """bfloat16 weights of a small random size, so that nothing overflows in 32 layers."""
    config, dtype = shape.config, torch.bfloat16
    shapes = config.tensor_shapes()
    generator = torch.Generator(device).manual_seed(seed)

    def take(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        if len(shapes[name]) == 1:
            return tensor.fill_(1.0)
        return tensor.normal_(std=0.02, generator=generator)

    return LlamaModel(
        config,
        take,
        backend=backend_for(device, dtype, shape.head_dim),
        ops=TorchOps(),
        dtype=dtype,
        device=device,
        group=SingleProcessGroup(device),
    )


def backend_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """What `load_target` would take there, without the CPU's own kernels."""
    if device.type == "cpu":
        return SdpaBackend()
    return choose_gpu_backend("auto", "auto", device=device, dtype=dtype, head_dim=head_dim)


def random_head(target: LlamaModel, *, seed: int = 1) -> DraftModel:
    """An MTP head of the target's own widths."""
    config = target.config
    spec = HeadSpec(
        kind="mtp",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope=config.rope,
        norm_eps=config.norm_eps,
        target_fingerprint="random",
    )
    generator = torch.Generator(target.device).manual_seed(seed)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        tensor = torch.empty(shape, dtype=target.dtype, device=target.device)
        is_norm = len(shape) == 1
        tensors[name] = (
            tensor.fill_(1.0) if is_norm else tensor.normal_(std=0.02, generator=generator)
        )
    return build_head(spec, tensors, target)

"""Is rejection sampling exact? A G-test of the joint of three tokens against exact scores.

The model is tiny (every triple is scored) but real: paged attention, a random head that drafts,
verification with residuals. The verdict has a false-alarm probability of 1e-4.

Shape legend: V vocabulary, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_train.config import HeadConfig
from mtp_train.heads.init import make_head_spec
from runtime.attention.sdpa import SdpaBackend
from runtime.config import DraftMode, EngineConfig
from runtime.engine import Engine
from runtime.head_spec import RopeSpec
from runtime.models.base import DraftModel, Model
from runtime.models.config import ModelConfig
from runtime.models.heads import build_head
from runtime.models.llama import LlamaModel
from runtime.ops import TorchOps
from runtime.parallel import SingleProcessGroup
from runtime.request import Request, SamplingParams

FALSE_ALARM = 1e-4
_PROMPT = (3, 7, 1, 9)
_TEMPERATURE = 1.2
_MIN_EXPECTED = 5.0  # rarer triples are pooled into one cell


@dataclass(frozen=True)
class GTest:
    """G statistic and the value it stays below with probability 1 - 1e-4 if sampling is exact."""

    statistic: float
    limit: float
    freedom: int

    @property
    def passed(self) -> bool:
        return self.statistic < self.limit


def joint_g_test(
    model: Model, head: DraftModel, *, k: int, draft_mode: DraftMode, count: int
) -> GTest:
    """Sample ``count`` continuations of three tokens, with speculation, against the exact joint."""
    vocab = model.vocab_size
    config = EngineConfig(
        max_running=512,
        num_pages=2048,
        page_size=16,
        max_batch_tokens=4096,
        max_model_len=32,
        num_draft_tokens=k,
        verify="rejection",
        draft_mode=draft_mode,
    )
    requests = [
        Request(
            str(seed),
            _PROMPT,
            SamplingParams(temperature=_TEMPERATURE, seed=seed, max_tokens=3, ignore_eos=True),
        )
        for seed in range(count)
    ]
    counts = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for generation in Engine(model, config=config, draft=head).generate(requests):
        counts[generation.output_ids] += 1
    expected = exact_joint(model).flatten() * count
    observed = counts.flatten()
    is_common = expected >= _MIN_EXPECTED
    observed = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    terms = torch.where(observed > 0, observed * (observed / expected).log(), 0.0)
    freedom = len(observed) - 1
    return GTest(float(2 * terms.sum()), chi_square_limit(freedom), freedom)


def chi_square_limit(freedom: int) -> float:
    """The ``1 - FALSE_ALARM`` quantile of chi-square, by bisection."""
    low, high = 0.0, 10.0 * freedom + 100.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    for _ in range(100):
        middle = (low + high) / 2
        tail = torch.special.gammaincc(half, torch.tensor(middle / 2, dtype=torch.float64))
        low, high = (middle, high) if float(tail) > FALSE_ALARM else (low, middle)
    return high


def exact_joint(model: Model) -> torch.Tensor:
    """p(t1, t2, t3 | prompt), ``[V, V, V]`` float64, from scores of every pair."""
    vocab = model.vocab_size
    config = EngineConfig(max_running=64, num_pages=512, max_model_len=32, max_batch_tokens=512)
    pairs = [(a, b) for a in range(vocab) for b in range(vocab)]
    joint = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    engine = Engine(model, config=config)
    for rows in engine.forward_hidden([[*_PROMPT, a, b] for a, b in pairs]):
        a, b = pairs[int(rows.key)]
        logits = model.logits(rows.hidden_TD[len(_PROMPT) - 1 :]).double() / _TEMPERATURE
        p = logits.softmax(-1)
        joint[a, b] = p[0, a] * p[1, b] * p[2]
    return joint


def tiny_pair(*, seed: int = 0) -> tuple[LlamaModel, DraftModel]:
    """A random two-layer target of eleven tokens in fp32, and a random head for it."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=11,
        max_position_embeddings=64,
        rope=RopeSpec(theta=10000.0),
        norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) * 0.3

    weights = {name: draw(shape) for name, shape in config.tensor_shapes().items()}
    model = LlamaModel(
        config,
        weights.__getitem__,
        backend=SdpaBackend(),
        ops=TorchOps(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=SingleProcessGroup(torch.device("cpu")),
    )
    spec = make_head_spec(HeadConfig(), config, fingerprint="")
    tensors = {name: draw(shape) for name, shape in spec.tensor_shapes().items()}
    return model, build_head(spec, tensors, model)

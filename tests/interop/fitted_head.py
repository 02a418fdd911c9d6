"""A head without training: one linear fit that guesses the target's next state, well enough to be
accepted now and then. What a serving test needs is a head whose acceptance a mistake would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from data_prep.evaluation import evaluation_prompts
from mtp_train.config import HeadConfig, TargetConfig
from mtp_train.features.target import cache_directory, load_tokenizer, target_directory
from mtp_train.heads.init import initialise, make_head_spec
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import save_head
from runtime.models.config import load_config
from runtime.models.loader import load_target
from runtime.request import HiddenRows, Request, SamplingParams

_NUM_PROMPTS = 40
_MAX_TOKENS = 96
_RIDGE = 30.0
_BLOCK_SCALE = 0.1  # of attention and MLP, which are random: they must matter, and not too much


def write_fitted_head(folder: Path, target: TargetConfig) -> Path:
    """``folder/head``, native, for a target with one ``model.safetensors``."""
    directory = target_directory(target)
    config = load_config(directory)
    loaded = load_target(
        directory,
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dir=cache_directory(target),
    )
    spec = make_head_spec(HeadConfig(), config, fingerprint=loaded.fingerprint)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        final_D = file.get_tensor("model.norm.weight").float()
        tensors = initialise(
            spec,
            method="random",
            seed=1,
            initializer_range=0.02,
            num_target_layers=config.num_layers,
            read_target=file.get_tensor,
        )
    fit(tensors, decode(directory, target, loaded), loaded.model.embedding_VD, final_D)
    for name in ("self_attn.v_proj.weight", "mlp.up_proj.weight"):
        tensors[f"layers.0.{name}"] *= _BLOCK_SCALE / 0.02
    save_head(folder / "head", spec, tensors)
    return folder / "head"


def fit(
    tensors: dict[str, torch.Tensor],
    decoded: Sequence[HiddenRows],
    embedding_VD: torch.Tensor,
    final_D: torch.Tensor,
) -> None:
    """Set ``eh_proj`` to the best linear guess of the next state, and the final norm to ``final``.

    Norms in front of it must have weight one.
    """
    inputs, outputs = [], []
    for rows in decoded:
        embedded = embedding_VD[torch.tensor(rows.token_ids)[1:]].float()
        inputs.append(torch.cat([unit(embedded), unit(rows.hidden_TD[:-1])], 1))
        outputs.append(rows.hidden_TD[1:] / final_D)
    x, y = torch.cat(inputs).double(), torch.cat(outputs).double()
    gram = x.t() @ x + _RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
    tensors["eh_proj.weight"] = torch.linalg.solve(gram, x.t() @ y).t().float().contiguous()
    tensors["norm.weight"] = final_D.clone()


def decode(directory: Path, target: TargetConfig, loaded: object) -> list[HiddenRows]:
    """The target's own answers with their states."""
    tokenizer = load_tokenizer(target, directory)
    requests = [
        Request(prompt.id, prompt.prompt_ids, SamplingParams(max_tokens=_MAX_TOKENS))
        for prompt in evaluation_prompts("mtbench", tokenizer, _NUM_PROMPTS)
    ]
    engine = Engine(
        loaded.model,  # type: ignore[attr-defined]
        config=EngineConfig(num_threads=1, max_running=20, max_batch_tokens=2048),
        eos_token_ids=loaded.eos_token_ids,  # type: ignore[attr-defined]
    )
    found: list[HiddenRows] = []
    engine.generate(requests, hidden_sink=found.append)
    return found


def unit(rows_ND: torch.Tensor) -> torch.Tensor:
    """RMS-normalised rows, as the head's input norms of weight one give them."""
    return rows_ND * rows_ND.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()

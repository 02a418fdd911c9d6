"""From a path to a running target: which directory, which tensors, and what identifies the weights.

Loading streams: one checkpoint tensor exists beside the weights already merged and packed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.attention.base import AttentionBackend
from runtime.attention.choice import choose_gpu_backend
from runtime.attention.cpu import CpuBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.config import AttentionChoice, AttentionKernel, Int8Grid, KvCache, StoredWeights
from runtime.cpu import choose_linear
from runtime.cpu_kernels import MAX_GROUP
from runtime.files import sha256_file, write_atomic
from runtime.kernel_library import load_kernels
from runtime.layer_parts import CORRECTION_BIAS
from runtime.linear import TensorSource
from runtime.models.checkpoint import Checkpoint, weight_files
from runtime.models.config import ModelConfig, load_config
from runtime.models.gguf import BUILT_IN, convert_gguf, find_built_in
from runtime.models.llama import LlamaModel
from runtime.models.quantised_source import KeptWidth, QuantisedSource, refuse_rounding
from runtime.ops import TorchOps
from runtime.parallel import ProcessGroup, SingleProcessGroup
from runtime.sharding import target_shards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A loaded target. ``path`` is the Hugging Face directory it came from (tokenizer included)."""

    model: LlamaModel
    config: ModelConfig
    path: Path
    fingerprint: str
    eos_token_ids: tuple[int, ...]


def default_cache_dir() -> Path:
    """Where converted targets and fingerprints are kept unless the user names another place."""
    return Path.home() / ".cache" / "mtp-train"


def load_target(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend | None = None,
    attention: AttentionChoice = "auto",
    attention_kernel: AttentionKernel = "auto",
    use_kernels: bool = True,
    stored_weights: StoredWeights = "auto",
    int8_grid: Int8Grid = "library",
    rounds_inputs: bool = True,
    kv_cache: KvCache = "model",
    cache_dir: Path | None = None,
    group: ProcessGroup | None = None,
    expert_parallel: bool = False,
) -> Target:
    """Resolve, check and load a target.

    ``path``: a Hugging Face directory, a ``.gguf`` file or a built-in name. On a CPU the fused
    kernels are used unless ``use_kernels`` is false or they cannot be built. ``attention`` and
    ``attention_kernel`` choose on a GPU (:func:`runtime.attention.choice.choose_gpu_backend`);
    ``backend`` overrides the choice of attention alone. ``cache_dir`` defaults to
    :func:`default_cache_dir`. ``group``: the ranks over which the weights are spread (default: all
    of them here); every one loads, and reads its own part only. ``stored_weights``,
    ``int8_grid`` and ``kv_cache`` as in :class:`runtime.config.EngineConfig`. Without
    ``rounds_inputs`` linears of a quantised target read what they are given: another function, for
    comparison. ``expert_parallel``: of experts this is some of them whole, instead of some columns
    of all. Raises ``ValueError`` naming the file, field or tensor that is wrong.
    """
    cache_dir = cache_dir or default_cache_dir()
    directory = resolve_target(path, cache_dir=cache_dir)
    config = load_config(directory)
    checkpoint = Checkpoint.of(directory, config)

    group = group or SingleProcessGroup(device)
    if expert_parallel and config.experts is None:
        raise ValueError(
            f"runtime.expert_parallel=true with {config.architecture}: it has no experts; use "
            "runtime.expert_parallel=false"
        )
    shards = target_shards(config, group, expert_parallel=expert_parallel)

    def take(name: str) -> torch.Tensor:
        own = torch.float32 if name.endswith(CORRECTION_BIAS) else dtype
        return checkpoint.read(name, dtype=own, device=device, shard=shards.get(name))

    source: TensorSource = take
    if config.quantisation is not None:
        refuse_rounding(config, checkpoint, world_size=group.world_size)
        kept = _kept_width(stored_weights, device=device, world_size=group.world_size)
        source = QuantisedSource(
            checkpoint,
            take,
            dtype=dtype,
            device=device,
            kept=kept,
            grid=int8_grid,
            rounds_inputs=rounds_inputs,
        )
    kernels = load_kernels(cache_dir) if use_kernels and device.type == "cpu" else None
    if (
        kernels is not None
        and not config.latent
        and config.num_heads // config.num_kv_heads > MAX_GROUP
    ):
        logger.warning("more than %d query heads per key head: no fused kernels", MAX_GROUP)
        kernels = None
    if kv_cache == "fp8_e4m3":
        _refuse_fp8_cache(config, attention, backend)
        backend = SdpaBackend()
    elif backend is None and config.latent is not None:
        backend = _latent_backend(config, attention)
    elif backend is None and device.type == "cuda":
        backend = choose_gpu_backend(
            attention, attention_kernel, device=device, dtype=dtype, head_dim=config.head_dim
        )
    elif backend is None:
        if attention == "flashinfer":
            raise ValueError(f"runtime.attention=flashinfer on {device}: it needs a CUDA device")
        backend = SdpaBackend() if kernels is None else CpuBackend(kernels)
    model = LlamaModel(
        config,
        source,
        backend=backend,
        ops=kernels or TorchOps(),
        dtype=dtype,
        device=device,
        group=group,
        make_linear=choose_linear(dtype, device, kernels),
        fp8_cache=checkpoint.read_kv_scales() if kv_cache == "fp8_e4m3" else None,
        expert_parallel=expert_parallel,
    )
    return Target(
        model=model,
        config=config,
        path=directory,
        fingerprint=fingerprint_target(directory, cache_dir=cache_dir),
        eos_token_ids=config.eos_token_ids,
    )


def _kept_width(asked: StoredWeights, *, device: torch.device, world_size: int) -> KeptWidth:
    if asked == "stored" and world_size > 1:
        raise ValueError(
            f"runtime.stored_weights=stored over {world_size} ranks: weights keep their stored "
            "width on one rank only; use runtime.stored_weights=dense"
        )
    if asked == "dense" or world_size > 1:
        return "none"
    if asked == "stored" or device.type == "cuda":
        return "all"
    return "products"


def _refuse_fp8_cache(
    config: ModelConfig, attention: AttentionChoice, backend: AttentionBackend | None
) -> None:
    if config.latent is not None:
        raise ValueError(
            f"runtime.kv_cache=fp8_e4m3 with latent attention ({config.architecture}): it is "
            "there for keys and values of heads; use runtime.kv_cache=model"
        )
    if attention == "flashinfer" or not isinstance(backend, SdpaBackend | None):
        raise ValueError(
            "runtime.kv_cache=fp8_e4m3 with runtime.attention=flashinfer: fp8 keys and values are "
            "read by SDPA; use runtime.attention=sdpa or auto"
        )


def _latent_backend(config: ModelConfig, attention: AttentionChoice) -> AttentionBackend:
    if attention == "flashinfer":
        raise ValueError(
            f"runtime.attention=flashinfer with latent attention ({config.architecture}): it is "
            "computed by SDPA; use runtime.attention=sdpa or auto"
        )
    return SdpaBackend()


def resolve_target(path: str | Path, *, cache_dir: Path) -> Path:
    """The Hugging Face directory for ``path``; GGUF files are de-quantised once into ``cache_dir``.

    Raises ``ValueError`` when nothing is there, or a built-in's package is not installed.
    """
    if str(path) in BUILT_IN:
        return convert_gguf(find_built_in(str(path)), cache_dir=cache_dir)
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == ".gguf":
        return convert_gguf(place, cache_dir=cache_dir)
    if place.is_dir():
        return place
    raise ValueError(
        f"target={path}: no such directory; expected a Hugging Face directory, a .gguf file or one "
        f"of the built-in names {', '.join(BUILT_IN)}"
    )


def fingerprint_target(path: Path, *, cache_dir: Path) -> str:
    """sha256 (hex) over the content of ``config.json`` and every weights file, in name order.

    Hashes of single files are remembered in ``cache_dir`` by path, size and modification time; the
    model's own directory is never written to.
    """
    memory_file = cache_dir / "fingerprints.json"
    memory: dict[str, str] = {}
    if memory_file.is_file():
        try:
            memory = json.loads(memory_file.read_text())
        except json.JSONDecodeError:
            logger.warning("%s is damaged: hashing the weights again", memory_file)
    total = hashlib.sha256()
    is_changed = False
    for file in [path / "config.json", *weight_files(path)]:
        stat = file.stat()
        key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in memory:
            memory[key] = sha256_file(file)
            is_changed = True
        total.update(f"{file.name}\0{memory[key]}\n".encode())
    if is_changed:
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(memory_file, json.dumps(memory, indent=1, sort_keys=True))
    return total.hexdigest()

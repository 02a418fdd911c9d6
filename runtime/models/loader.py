"""From a path to a running target: which directory, which tensors, and what identifies the weights.

Loading streams: one checkpoint tensor exists beside the weights already merged and packed. Names
and shapes are strict, a silent default would train a head against the wrong model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runtime.attention.base import AttentionBackend
from runtime.attention.choice import choose_gpu_backend
from runtime.attention.cpu import CpuBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.config import AttentionChoice, AttentionKernel, Int8Grid, KvCache, StoredWeights
from runtime.cpu import choose_linear
from runtime.cpu_kernels import MAX_GROUP
from runtime.files import sha256_file, write_atomic
from runtime.kernel_library import load_kernels
from runtime.kv_cache import Fp8Scales
from runtime.layer_parts import CORRECTION_BIAS
from runtime.linear import TensorSource
from runtime.models.config import ModelConfig, load_config
from runtime.models.gguf import BUILT_IN, convert_gguf, find_built_in
from runtime.models.llama import LlamaModel
from runtime.models.quantisation import InputScheme, LinearScheme, Quantisation
from runtime.models.quantised_source import KeptWidth, QuantisedSource, refuse_rounding
from runtime.models.stored_tensors import (
    Shapes,
    check_dtype,
    kv_scale_names,
    read_weight,
    stored_shapes,
)
from runtime.ops import TorchOps
from runtime.parallel import ProcessGroup, SingleProcessGroup
from runtime.quantised_linear import StaticRange
from runtime.sharding import Shard, target_shards
from runtime.stored_weight import StoredWeight

logger = logging.getLogger(__name__)

_INDEX_NAME = "model.safetensors.index.json"
_WEIGHTS_NAME = "model.safetensors"
_WIDTHS = {"F8": "fp8", "I8": "int8"}


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


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory by name. Raises ``ValueError`` if there are none."""
    index = path / _INDEX_NAME
    if index.is_file():
        return [path / name for name in sorted(set(_read_weight_map(index).values()))]
    if (path / _WEIGHTS_NAME).is_file():
        return [path / _WEIGHTS_NAME]
    raise ValueError(f"target={path}: neither {_WEIGHTS_NAME} nor {_INDEX_NAME} is there")


class Checkpoint:
    """The tensors of a directory, checked against a strict list when opened, read one at a time.

    With a tied head a stored ``lm_head.weight`` is allowed and must equal the embedding. Tensors
    whose names begin with one of ``unread`` are neither checked nor read. ``quantisation`` says
    which weights are stored how (:mod:`runtime.models.stored_tensors`).
    """

    @classmethod
    def of(cls, path: Path, config: ModelConfig) -> Checkpoint:
        """The checkpoint of a target of this shape."""
        return cls(
            path,
            config.tensor_shapes(),
            tied=config.tie_word_embeddings,
            unread=config.native_prefixes,
            quantisation=config.quantisation,
        )

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        tied: bool,
        unread: tuple[str, ...] = (),
        quantisation: Quantisation | None = None,
    ) -> None:
        self._quantisation = quantisation
        self._schemes: dict[str, LinearScheme] = {}
        self._shapes = dict(shapes)
        dtypes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        self._is_tied = tied
        found: dict[str, tuple[int, ...]] = {}
        for file in weight_files(path):
            if not file.is_file():
                raise ValueError(
                    f"target={path}: {file.name} is listed in {_INDEX_NAME} but missing"
                )
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118
                        stored = handle.get_slice(name)
                        found[name] = tuple(stored.get_shape())
                        dtypes[name] = stored.get_dtype()
                        self._file_of[name] = file
            except SafetensorError as error:
                raise ValueError(f"{file}: damaged safetensors file ({error})") from error
        expected = self._expected(dtypes, source=f"target={path}")
        for name, allowed in expected.items():
            if name not in found:
                raise ValueError(f"target={path}: tensor {name} {list(allowed[0])} is missing")
            if found[name] not in allowed:
                raise ValueError(
                    f"target={path}: tensor {name} has shape {list(found[name])}, "
                    f"expected {list(allowed[0])}"
                )
        for name in found:
            is_tied_copy = tied and name == "lm_head.weight"
            is_known = name in expected or is_tied_copy or name.startswith(unread)
            if not is_known and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(f"target={path}: unexpected tensor {name}")
        if tied and "lm_head.weight" in found:
            self._check_tied(path)

    def read(
        self, name: str, *, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
    ) -> torch.Tensor:
        """One tensor, or one rank's part of it, de-quantised, converted and moved; nothing stays
        mapped.
        """
        if name in self._schemes:
            whole = self.read_weight(name).dense(torch.float32)
            return (whole if shard is None else shard.cut(whole)).to(device=device, dtype=dtype)
        with safe_open(self._file_of[name], framework="pt") as handle:
            if shard is None:
                return handle.get_tensor(name).to(device=device, dtype=dtype, copy=True)
            stored = handle.get_slice(name)
            shape = tuple(stored.get_shape())
            if shard.is_whole(shape):
                return handle.get_tensor(name).to(device=device, dtype=dtype, copy=True)
            before = (slice(None),) * shard.dim
            part = shard.assemble(lambda start, stop: stored[(*before, slice(start, stop))], shape)
            return part.to(device=device, dtype=dtype)

    def read_vocabulary(
        self, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and ``lm_head``, ``[V, D]`` each; one tensor where they are tied."""
        embedding_VD = self.read("model.embed_tokens.weight", dtype=dtype, device=device)
        if self._is_tied:
            return embedding_VD, embedding_VD
        return embedding_VD, self.read("lm_head.weight", dtype=dtype, device=device)

    def holds(self, name: str) -> bool:
        """Whether the directory has a tensor of that name, asked for or not."""
        return name in self._file_of

    def is_quantised(self, name: str) -> bool:
        return name in self._schemes

    def stored_dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is not quantised."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            return handle.get_slice(name)[:0].dtype

    def read_stored(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, on the host; nothing of the file stays mapped."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            return handle.get_tensor(name).clone()

    def scheme_of(self, name: str) -> LinearScheme | None:
        """How the weight ``name`` is quantised; ``None`` where it is not."""
        return self._schemes.get(name)

    def read_weight(self, name: str) -> StoredWeight:
        """A quantised weight as it is stored, on the host."""
        assert self._quantisation is not None, "an unquantised checkpoint"
        shape, scheme = self._shapes[name], self._schemes[name]
        return read_weight(name, shape, scheme, self._quantisation, self.read_stored)

    def read_input_range(self, name: str, scheme: InputScheme) -> StaticRange | None:
        """The stored range of what the linear with the weight ``name`` reads."""
        if scheme.is_dynamic:
            return None
        module = name.removesuffix("weight")
        scale = float(self.read_stored(module + "input_scale"))
        if scheme.is_symmetric:
            return StaticRange(scale)
        return StaticRange(scale, float(self.read_stored(module + "input_zero_point")))

    def read_kv_scales(self) -> Fp8Scales:
        """Of an fp8 cache, by layer; ones where the checkpoint has none."""
        names = [name for name in kv_scale_names(self._shapes) if name in self._file_of]
        scales = [float(self.read_stored(name)) for name in names]
        return Fp8Scales(tuple(scales[0::2]), tuple(scales[1::2]))

    def _expected(self, dtypes: Mapping[str, str], *, source: str) -> dict[str, Shapes]:
        """The strict list of what is stored; fills in which weights are quantised."""
        quantisation = self._quantisation
        expected: dict[str, Shapes] = {}
        for name, shape in self._shapes.items():
            scheme = None
            if quantisation is not None and len(shape) == 2:
                scheme = quantisation.scheme_of(name)
                if quantisation.by_stored_dtype and not dtypes.get(name, "").startswith("F8"):
                    scheme = None
            if scheme is None:
                if dtypes.get(name, "").startswith(("F8", "I8")):
                    raise ValueError(
                        f"{source}: tensor {name} is stored in {_WIDTHS[dtypes[name][:2]]}; "
                        "config.json has to say so (quantization_config), and only weights can be"
                    )
                expected[name] = (shape,)
                continue
            assert quantisation is not None
            self._schemes[name] = scheme
            expected |= stored_shapes(name, shape, scheme, quantisation)
            stored = name + "_packed" if scheme.weights.is_packed else name
            if stored in dtypes:
                check_dtype(stored, dtypes[stored], scheme, source=source)
        if quantisation is not None and quantisation.has_kv_scales:
            expected |= dict.fromkeys(kv_scale_names(self._shapes), ((1,), (), (1, 1)))
        return expected

    def _check_tied(self, path: Path) -> None:
        cpu = torch.device("cpu")
        names = ("model.embed_tokens.weight", "lm_head.weight")
        embedding, head = (self.read(n, dtype=torch.float32, device=cpu) for n in names)
        if not torch.equal(embedding, head):
            raise ValueError(
                f"target={path}: tie_word_embeddings is true but lm_head.weight differs from "
                "model.embed_tokens.weight"
            )


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index}: no readable weight_map ({error!r})") from error
    assert isinstance(weight_map, dict), "weight_map is not an object"
    return weight_map

"""The tensors of a Hugging Face directory, read one at a time and against a strict list.

Names and shapes are strict, a silent default would train a head against the wrong model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runtime.kv_cache import Fp8Scales
from runtime.models.config import ModelConfig
from runtime.models.quantisation import InputScheme, LinearScheme, Quantisation
from runtime.models.stored_tensors import (
    Shapes,
    check_dtype,
    kv_scale_names,
    read_weight,
    stored_shapes,
)
from runtime.quantised_linear import StaticRange
from runtime.sharding import Shard
from runtime.stored_weight import StoredWeight

_INDEX_NAME = "model.safetensors.index.json"
_WEIGHTS_NAME = "model.safetensors"
_WIDTHS = {"F8": "fp8", "I8": "int8"}


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

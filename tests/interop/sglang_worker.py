"""Run in an interpreter that finds SGLang's sources and, for what it imports besides, vLLM's
environment: ``python sglang_worker.py TARGET HEAD OUT.safetensors``.

SGLang serves on no CPU that lacks its kernels, so nothing is computed here. What is executed is its
own reading of a head: ``ModelConfig`` for a draft model, the class that its registry finds, and
that class's ``load_weights``. Parameters are NaN before; those that stay so were not loaded. Only
packages of kernels are replaced by empty modules. The metadata of OUT says what was found.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
from collections.abc import Sequence
from unittest.mock import MagicMock

KERNELS = ("sgl_kernel", "flashinfer", "torchvision", "IPython")


class EmptyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.split(".")[0] not in KERNELS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


def main(target: str, head: str, out: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoImageProcessor, AutoProcessor  # noqa: F401 (look for torchvision)

    sys.meta_path.insert(0, EmptyModules())
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(
        ServerArgs(
            model_path=target,
            device="cpu",
            attention_backend="torch_native",
            disable_cuda_graph=True,
        )
    )
    with tempfile.NamedTemporaryFile(prefix="mtp-sglang-") as meeting:
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{meeting.name}",
        )
        initialize_model_parallel(backend="gloo")
        config = ModelConfig(head, is_draft_model=True, dtype="float32")
        made, architecture = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
        torch.set_default_dtype(torch.float32)
        with get_parallel().override(tp_rank=0, moe_ep_rank=0, moe_tp_rank=0):
            model = made(config.hf_config, None)
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
            model.load_weights(iter(load_file(f"{head}/model.safetensors").items()))
    loaded = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = getattr(model, "hot_token_id", None)
    if ids is not None:
        loaded["hot_token_id"] = ids
    save_file(loaded, out, metadata={"found": json.dumps({"architecture": architecture})})


if __name__ == "__main__":
    main(*sys.argv[1:4])

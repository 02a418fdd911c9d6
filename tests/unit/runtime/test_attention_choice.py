"""Which attention a GPU target gets, and what is said about it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.settings import ConfigError, load_config
from runtime.attention import choice
from runtime.attention.choice import GpuFacts, choose_gpu_backend, load_flashinfer
from runtime.attention.flashinfer import FlashInferBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.models.loader import load_target
from tests.unit.runtime.flashinfer_emulator import EmulatedStream, emulate
from tests.unit.runtime.flashinfer_signatures import recorded, recorded_versions
from tests.unit.runtime.model_fixtures import save_llama

HOPPER = GpuFacts(capability=(9, 0), has_package=True, has_compiler=True)
CPU = torch.device("cpu")


def choose(attention: Any, facts: GpuFacts, **changes: Any) -> Any:
    settings = {"device": CPU, "dtype": torch.bfloat16, "head_dim": 128, **changes}
    kernel = settings.pop("kernel", "auto")
    return choose_gpu_backend(attention, kernel, facts=facts, **settings)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = EmulatedStream()
    module = emulate(recorded(recorded_versions()[-1]), stream)
    monkeypatch.setattr(choice, "load_flashinfer", lambda: module)
    monkeypatch.setattr(torch.cuda, "Event", stream.new_event)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("attention", ["auto", "flashinfer"])
@pytest.mark.parametrize("kernel", ["auto", "fa2", "fa3", "xqa"])
def test_flashinfer_where_it_can_run(attention: str, kernel: str) -> None:
    backend = choose(attention, HOPPER, kernel=kernel)
    assert isinstance(backend, FlashInferBackend)
    assert (backend._xqa is not None) == (kernel == "xqa")


def test_sdpa_by_name_asks_nothing_of_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(choose("sdpa", HOPPER), SdpaBackend)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (GpuFacts((9, 0), False, True), "flashinfer-python is not installed"),
        (GpuFacts((9, 0), True, False), "nvcc is not there"),
        (GpuFacts((7, 5), True, True), "compute capability 7.5 is below 8.0"),
    ],
)
def test_a_machine_without_it(facts: GpuFacts, why: str, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(choose("auto", facts), SdpaBackend)
    assert why in caplog.text
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match=rf"^runtime\.attention=flashinfer: {why}"):
        choose("flashinfer", facts)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"dtype": torch.float32},
            "computes in float16 or bfloat16, the target is in torch.float32",
        ),
        ({"head_dim": 80}, "the target's have 80"),
    ],
)
def test_what_its_kernels_do_not_compute_goes_to_sdpa(
    changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(choose("flashinfer", HOPPER, **changes), SdpaBackend)
    assert why in caplog.text


def test_an_import_that_fails_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'tvm_ffi'")

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(ValueError, match=r"cannot be imported \(No module named 'tvm_ffi'\)"):
        load_flashinfer()


def test_a_cpu_has_no_flashinfer(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(ValueError, match="it needs a CUDA device"):
        load_target(tmp_path, dtype=torch.float32, device=CPU, attention="flashinfer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            (("runtime.attention", "flashinfer"), ("target.device", "cpu")),
            r"^runtime\.attention=flashinfer with target\.device=cpu: it needs a GPU",
        ),
        (
            (("runtime.attention", "sdpa"), ("runtime.attention_kernel", "fa2")),
            r"^runtime\.attention_kernel=fa2 with runtime\.attention=sdpa",
        ),
        (
            (("runtime.cuda_graphs", True), ("target.device", "cpu")),
            r"^runtime\.cuda_graphs=true with target\.device=cpu",
        ),
        (
            (("runtime.cuda_graphs", True), ("runtime.attention", "sdpa")),
            r"runtime\.attention=sdpa: only FlashInfer's attention on a GPU is recorded",
        ),
        (
            (("runtime.attention", "flashinfr"),),
            r"allowed are auto, sdpa, flashinfer; did you mean",
        ),
        (
            (("runtime.attention_kernel", "xqa"), ("runtime.page_size", 8)),
            r"^runtime\.page_size=8 with runtime\.attention_kernel=xqa",
        ),
    ],
)
def test_attention_that_cannot_be_had_is_refused(
    changes: tuple[tuple[str, Any], ...], message: str
) -> None:
    raw: dict[str, Any] = {"run": {"name": "mine"}, "target": {"path": "/models/llama"}}
    raw["data"] = {"sources": ["my.jsonl"]}
    for key, value in changes:
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
    with pytest.raises(ConfigError, match=message):
        load_config(raw)

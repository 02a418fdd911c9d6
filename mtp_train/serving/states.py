"""Residual streams out of a vLLM in the user's own environment, batch by batch.

vLLM's layer ``k`` is the un-normed residual stream ``S_k``: the input of decoder layer ``k``, and
with ``k`` the number of layers what the final norm gets. What runs there is ``states_worker.py``.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mtp_train.serving.job import ServingError
from mtp_train.serving.process import end_group, engine_environment, tail

WORKER = Path(__file__).with_name("states_worker.py")


@dataclass(frozen=True)
class StatesJob:
    """What vLLM is started with. ``layer_ids``: of the streams, in the order they are wanted."""

    target: Path
    dtype: str
    layer_ids: tuple[int, ...]
    max_model_len: int
    max_batch_tokens: int
    llm_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Streams:
    """``streams_TaD``: ``[T, len(layer_ids), D]`` in the served dtype, host memory."""

    token_ids: tuple[int, ...]
    streams_TaD: torch.Tensor = field(repr=False)


class StatesProcess:
    """A started worker; leave the context to end it. Raises :class:`ServingError` throughout."""

    def __init__(
        self,
        job: StatesJob,
        *,
        python: Path,
        num_threads: int = 0,
        timeout_s: float = 3600.0,
        worker: Path = WORKER,
    ) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="mtp-states-")
        root = Path(self._folder.name)
        job_file, self._log_file = root / "job.json", root / "engine.log"
        job_file.write_text(json.dumps(self._content(root / "states")))
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), str(worker), str(job_file)],
                env=engine_environment(num_threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        try:
            self.version = str(self._receive("load")["version"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StatesProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        end_group(self._process)
        self._folder.cleanup()

    def streams(self, batches: Sequence[Sequence[Sequence[int]]]) -> Iterator[list[Streams]]:
        """Batch by batch; the next one is computed while this one is used."""
        for index, batch in enumerate(batches):
            if index == 0:
                self._send(batch)
            files = self._receive("decode")["files"]
            if index + 1 < len(batches):
                self._send(batches[index + 1])
            if len(files) != len(batch):
                raise ServingError("decode", f"{len(files)} files for {len(batch)} sequences")
            yield [self._read(Path(file), ids) for file, ids in zip(files, batch, strict=True)]

    def _content(self, folder: Path) -> dict[str, Any]:
        job = self._job
        return {
            "target": str(job.target.resolve()),
            "dtype": job.dtype,
            "layer_ids": list(job.layer_ids),
            "max_model_len": job.max_model_len,
            "max_num_batched_tokens": max(job.max_batch_tokens, job.max_model_len),
            "folder": str(folder),
            "llm_args": dict(job.llm_args),
        }

    def _read(self, file: Path, token_ids: Sequence[int]) -> Streams:
        """One file, removed once it is read."""
        try:
            tensors = load_file(file)
            streams, ids = tensors["hidden_states"], tensors["token_ids"]
        except (OSError, KeyError, SafetensorError) as error:
            raise ServingError(
                "decode", f"{file.name}: not as vLLM writes it: {error!r}"
            ) from error
        if ids.tolist() != list(token_ids):
            raise ServingError("decode", f"{file.name}: states of other tokens than were asked for")
        wanted = (len(ids), len(self._job.layer_ids))
        if streams.dim() != 3 or tuple(streams.shape[:2]) != wanted:
            raise ServingError(
                "decode",
                f"{file.name}: hidden_states of shape {tuple(streams.shape)}, expected "
                f"[{wanted[0]} tokens, {wanted[1]} layers, width]",
            )
        empty = (streams == 0).flatten(1).all(1)
        if empty.any():
            raise ServingError(
                "decode",
                f"{file.name}: {int(empty.sum())} of {len(ids)} rows are zero, the first at "
                f"{int(empty.int().argmax())}: they were not computed, as with a prefix cache",
            )
        file.unlink()
        return Streams(tuple(token_ids), streams)

    def _send(self, batch: Sequence[Sequence[int]]) -> None:
        assert self._process.stdin is not None, "opened with a pipe"
        line = json.dumps({"sequences": [list(ids) for ids in batch]}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # why it ended is what receiving says
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _receive(self, stage: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise ServingError(
                stage, f"no answer after engine.timeout_s={self._timeout_s:g}: {self._tail()}"
            ) from None
        if not line:
            code = self._process.wait()
            hint = ", killed, perhaps for its memory" if code == -signal.SIGKILL else ""
            raise ServingError(stage, f"vLLM ended with {code}{hint}: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            raise ServingError(error["stage"], f"features.source=vllm: {error['message']}")
        return answer

    def _tail(self) -> str:
        return tail(self._log_file)

    def _read_lines(self) -> None:
        assert self._process.stdout is not None, "opened with a pipe"
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

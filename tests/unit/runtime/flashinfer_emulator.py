"""FlashInfer on a CPU: wrappers with the package's own signatures that compute attention from what
``plan`` and ``run`` were given, the way the kernels do.

What is emulated because code can get it wrong:

* a kernel reads offsets, page ids and last page lengths from *device* memory (in graph mode from
  the buffers of the constructor), FA3 its lengths from the plan (``plan`` writes them to the
  wrapper's own workspace, so that a replay sees a later plan);
* ``plan`` stages through one pinned buffer: planning again before the copy is done is an error;
* graph mode: fixed number of requests, at most the rows of the first plan, buffers large enough;
* int32 indices, dtypes as planned (float16 unless named), LSE in base 2, causal is bottom-right;
* a packed mask is read at byte offsets, while ``plan`` puts element offsets beside one that is
  given packed.

Every attention is one custom operator, so that a recorder of operators replays it as a kernel.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.unit.runtime.flashinfer_signatures import ENTRY_POINTS

_WORKSPACE = 4096


class EmulatedEvent:
    """Copies that were in flight when it was recorded are done once it has been waited for.

    With ``device.runs_by_itself`` false nothing is ever done before somebody waits.
    """

    def __init__(self, device: EmulatedStream) -> None:
        self._device = device
        self._covered: set[int] = set()

    def query(self) -> bool:
        if self._device.runs_by_itself:
            self.synchronize()
        return not (self._covered & self._device.in_flight)

    def record(self) -> None:
        self._covered = set(self._device.in_flight)

    def synchronize(self) -> None:
        self._device.in_flight -= self._covered


class EmulatedStream:
    """Which wrappers' plans are still being copied."""

    def __init__(self) -> None:
        self.in_flight: set[int] = set()
        self.runs_by_itself = True

    def new_event(self) -> EmulatedEvent:
        return EmulatedEvent(self)


def emulate(
    signatures: dict[str, inspect.Signature], stream: EmulatedStream, *, auto: str = "fa3"
) -> Any:
    """A stand-in for the module; ``auto`` is what backend "auto" becomes for several rows."""
    assert set(signatures) == set(ENTRY_POINTS)

    class Base:
        name = ""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = _bind(signatures[f"{self.name}.__init__"], (self, *args), kwargs)
            self.given = given
            assert given["float_workspace_buffer"].dtype is torch.uint8
            assert given["float_workspace_buffer"].numel() >= 128 * 1024 * 1024
            assert given["kv_layout"] == "NHD", "the emulator knows one layout"
            self.is_graph = given["use_cuda_graph"]
            self.workspace = torch.zeros(_WORKSPACE, dtype=torch.int32)
            self.max_rows: int | None = None
            self.planned: dict[str, Any] | None = None

        def plan(self, *args: Any, **kwargs: Any) -> None:
            planned = _bind(signatures[f"{self.name}.plan"], (self, *args), kwargs)
            assert id(self) not in stream.in_flight, "planned again while the plan is being copied"
            stream.in_flight.add(id(self))
            with _unguarded():  # it reads host tensors, which are no device's
                self.take_layout(planned)
            self.planned = planned

        def run(self, *args: Any, **kwargs: Any) -> Any:
            given = _bind(signatures[f"{self.name}.run"], (self, *args), kwargs)
            assert self.planned is not None, "run before plan"
            return self.attend(given, self.planned)

        def take_layout(self, planned: dict[str, Any]) -> None:
            raise NotImplementedError

        def attend(self, given: dict[str, Any], planned: dict[str, Any]) -> Any:
            raise NotImplementedError

        def keep(self, buffer: str, value: torch.Tensor) -> torch.Tensor:
            """The device copy: in graph mode into the constructor's buffer."""
            assert value.dtype is torch.int32, f"{buffer}: {value.dtype}"
            if not self.is_graph:
                return value.clone()
            fixed = self.given[buffer]
            assert fixed.dtype is torch.int32
            if "indices" in buffer:
                assert len(value) <= len(fixed), "paged_kv_indices exceeds the allocated buffer"
                fixed[: len(value)].copy_(value)
            else:
                assert len(value) == len(fixed), "the batch size is fixed in graph mode"
                fixed.copy_(value)
            return fixed

        def attention(
            self,
            given: dict[str, Any],
            planned: dict[str, Any],
            *,
            causal: bool,
            bakes_lengths: bool,
            mask: torch.Tensor | None,
            mask_starts: torch.Tensor | None,
        ) -> Any:
            q, (k, v) = given["q"], given["paged_kv_cache"]
            for tensor, name in ((q, "q_data_type"), (k, "kv_data_type"), (v, "kv_data_type")):
                wanted = _dtype(planned[name] or planned["q_data_type"])
                assert tensor.dtype is wanted, f"{name} planned {wanted}, run with {tensor.dtype}"
            assert q.stride(-1) == 1
            head_dim = planned.get("head_dim_qk") or planned["head_dim"]
            assert q.shape[1:] == (planned["num_qo_heads"], head_dim)
            assert k.shape[1:] == (planned["page_size"], planned["num_kv_heads"], head_dim)
            scale = planned["sm_scale"] or 1 / math.sqrt(head_dim)
            out = given["out"]
            if out is None:
                out = torch.empty(q.shape, dtype=q.dtype)
            assert out.shape == q.shape
            assert out.is_contiguous()
            lse = torch.empty(q.shape[:2])
            paged_attention(
                q, k, v, self.qo, self.kv, self.pages, self.last, self.workspace, mask,
                mask_starts, causal, bakes_lengths, scale, out, lse,
            )  # fmt: skip
            return (out, lse) if given["return_lse"] else out

        qo: torch.Tensor
        kv: torch.Tensor
        pages: torch.Tensor
        last: torch.Tensor

    class Prefill(Base):
        name = "BatchPrefillWithPagedKVCacheWrapper"

        def take_layout(self, planned: dict[str, Any]) -> None:
            qo, kv = planned["qo_indptr"], planned["paged_kv_indptr"]
            last, pages = planned["paged_kv_last_page_len"], planned["paged_kv_indices"]
            self.num_rows = rows = int(qo[-1])
            if self.is_graph:
                self.max_rows = self.max_rows or rows
                assert rows <= self.max_rows, "more rows than the first plan in graph mode"
            self.qo = self.keep("qo_indptr_buf", qo)
            self.kv = self.keep("paged_kv_indptr_buf", kv)
            self.pages = self.keep("paged_kv_indices_buf", pages)
            self.last = self.keep("paged_kv_last_page_len_buf", last)
            lens = _kv_lens(kv, last, planned["page_size"])
            self.workspace[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
            packed, plain = planned["packed_custom_mask"], planned["custom_mask"]
            backend = self.given["backend"]
            self.backend = auto if backend == "auto" else backend
            self.mask: torch.Tensor | None = None
            self.mask_starts: torch.Tensor | None = None
            if packed is None and plain is None:
                return
            assert self.backend == "fa2", "FA3 knows no custom masks"
            assert packed is not None, "the emulator packs no masks (packing waits for the device)"
            counts = [q * k for q, k in zip((qo[1:] - qo[:-1]).tolist(), lens, strict=True)]
            starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)  # elements, not bytes
            if self.is_graph:
                self.mask, self.mask_starts = self.given["custom_mask_buf"], None
                assert torch.is_tensor(self.mask)
                self.mask[: len(packed)].copy_(packed)
                self.mask_starts = self.given["mask_indptr_buf"]
                assert torch.is_tensor(self.mask_starts)
                self.mask_starts.copy_(starts)
            else:
                self.mask, self.mask_starts = packed.clone(), starts

        def attend(self, given: dict[str, Any], planned: dict[str, Any]) -> Any:
            assert len(given["q"]) == self.num_rows, "run with other rows"
            return self.attention(
                given,
                planned,
                causal=planned["causal"],
                bakes_lengths=self.backend == "fa3",
                mask=self.mask,
                mask_starts=self.mask_starts,
            )

    class Decode(Base):
        name = "BatchDecodeWithPagedKVCacheWrapper"

        def take_layout(self, planned: dict[str, Any]) -> None:
            kv, last = planned["indptr"], planned["last_page_len"]
            self.qo = torch.arange(len(kv), dtype=torch.int32)
            self.kv = self.keep("paged_kv_indptr_buffer", kv)
            self.pages = self.keep("paged_kv_indices_buffer", planned["indices"])
            self.last = self.keep("paged_kv_last_page_len_buffer", last)
            group = planned["num_qo_heads"] // planned["num_kv_heads"]
            assert self.given["use_tensor_cores"] or group in (1, 2, 3, 4, 8), f"group of {group}"

        def attend(self, given: dict[str, Any], planned: dict[str, Any]) -> Any:
            assert len(given["q"]) == len(planned["last_page_len"]), "run with other rows"
            return self.attention(
                given, planned, causal=False, bakes_lengths=False, mask=None, mask_starts=None
            )

    def merge_state(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = _bind(signatures["merge_state"], args, kwargs)
        a, b = given["s_a"], given["s_b"]
        assert a.dtype is torch.float32
        assert b.dtype is torch.float32
        merged = torch.logaddexp2(a, b)
        weights_a, weights_b = torch.exp2(a - merged)[..., None], torch.exp2(b - merged)[..., None]
        out = given["v_a"].float() * weights_a + given["v_b"].float() * weights_b
        return out.to(given["v_a"].dtype), merged

    def xqa(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = _bind(signatures["decode.trtllm_batch_decode_with_kv_cache"], args, kwargs)
        k, v = given["kv_cache"]
        assert given["kv_layout"] == "NHD"
        assert given["backend"] == "xqa"
        assert k.shape[1] in (16, 32, 64, 128)
        assert given["query"].is_contiguous()
        assert given["block_tables"].dtype is torch.int32
        assert given["seq_lens"].dtype is torch.uint32
        assert given["max_seq_len"] == given["block_tables"].shape[1] * k.shape[1]
        q_len, mask = given["q_len_per_req"], given["mask"]
        if q_len > 1:
            assert mask.dtype is torch.uint16
            words = -(-q_len // 32) * 2
            assert mask.shape == (len(given["query"]) // q_len, q_len, words)
        out = torch.empty_like(given["query"])
        xqa_attention(
            given["query"], k, v, given["block_tables"], given["seq_lens"].view(torch.int32),
            None if mask is None else mask.view(torch.int16), q_len, given["bmm1_scale"], out,
        )  # fmt: skip
        return out

    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        merge_state=merge_state,
        decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=xqa),
    )


@torch.library.custom_op("mtp_train_tests::paged_attention", mutates_args=("out", "lse"))
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    page_ids: torch.Tensor,
    last_page_lens: torch.Tensor,
    planned_lens: torch.Tensor,
    mask: torch.Tensor | None,
    mask_starts: torch.Tensor | None,
    causal: bool,
    bakes_lengths: bool,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The kernel: everything about the batch is read from tensors when it runs."""
    page_size = k.shape[1]
    lens = _kv_lens(kv_indptr, last_page_lens, page_size)
    rows, pages = qo_indptr.tolist(), kv_indptr.tolist()
    for b, kv_len in enumerate(lens):
        if bakes_lengths:
            kv_len = int(planned_lens[b])
        own = page_ids[pages[b] : pages[b] + -(-kv_len // page_size)].long()
        keys, values = (t[own].flatten(0, 1)[:kv_len] for t in (k, v))
        count = rows[b + 1] - rows[b]
        visible = torch.ones(count, kv_len, dtype=torch.bool)
        if mask is not None:
            assert mask_starts is not None
            bits = int(mask_starts[b]) * 8 + torch.arange(count * kv_len)
            inside = (bits // 8).clamp(max=len(mask) - 1)  # past the end a kernel reads garbage
            visible = (mask[inside] >> (bits % 8).to(torch.uint8) & 1).bool().view(count, kv_len)
        elif causal:
            visible = visible.tril(kv_len - count)
        span = slice(rows[b], rows[b + 1])
        out[span], lse[span] = _attend(q[span], keys, values, visible, scale)


@torch.library.custom_op("mtp_train_tests::xqa_attention", mutates_args=("out",))
def xqa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    mask: torch.Tensor | None,
    q_len: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    page_size = k.shape[1]
    for b, kv_len in enumerate(kv_lens.tolist()):
        own = block_tables[b, : -(-kv_len // page_size)].long()
        keys, values = (t[own].flatten(0, 1)[:kv_len] for t in (k, v))
        visible = torch.ones(q_len, kv_len, dtype=torch.bool)
        if mask is not None:
            bits = torch.arange(q_len)
            words = mask[b].int() & 0xFFFF
            visible[:, kv_len - q_len :] = (words[:, bits // 16] >> (bits % 16) & 1).bool()
        span = slice(b * q_len, (b + 1) * q_len)
        out[span], _ = _attend(q[span], keys, values, visible, scale)


def _attend(
    q_SHC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    visible_ST: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    repeat = q_SHC.shape[1] // k_TGC.shape[1]
    keys, values = (t.double().repeat_interleave(repeat, 1) for t in (k_TGC, v_TGC))
    scores = torch.einsum("shc,thc->sht", q_SHC.double(), keys) * scale
    scores = scores.masked_fill(~visible_ST[:, None], float("-inf"))
    out = torch.einsum("sht,thc->shc", scores.softmax(-1), values)
    return out.to(q_SHC.dtype), (scores.logsumexp(-1) / math.log(2)).float()


def _kv_lens(kv_indptr: torch.Tensor, last_page_lens: torch.Tensor, page_size: int) -> list[int]:
    for length in last_page_lens.tolist():
        assert 1 <= length <= page_size, f"last page of {length} slots, pages have {page_size}"
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return ((pages - 1) * page_size + last_page_lens).tolist()


@contextmanager
def _unguarded() -> Iterator[None]:
    """What happens within is the package's own business, not the caller's (see `no_wait`)."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _bind(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Raises ``TypeError`` for whatever the real function would not take."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _dtype(value: Any) -> torch.dtype:
    return getattr(torch, value) if isinstance(value, str) else value

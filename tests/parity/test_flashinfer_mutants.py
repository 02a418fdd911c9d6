"""Faults of the FlashInfer backend, or of our idea of the package, that the cases must notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.attention import flashinfer, flashinfer_tree, flashinfer_xqa
from runtime.attention.flashinfer import FlashInferBackend, FlashInferPlan
from runtime.attention.flashinfer_wrappers import Wrappers
from runtime.attention.paged import PagedLayout, page_layout
from tests.unit.runtime import flashinfer_emulator
from tests.unit.runtime.flashinfer_cases import (
    decode_steps,
    make_backend,
    mixed_rows,
    tree_rows,
    verify_after_a_swap,
    verify_steps,
)
from tests.unit.runtime.flashinfer_emulator import EmulatedStream
from tests.unit.runtime.flashinfer_signatures import recorded_versions

NEWEST = recorded_versions()[-1]
Patch = Callable[[pytest.MonkeyPatch], None]
Case = Callable[[FlashInferBackend], float]


def notices(case: Case, **settings: Any) -> bool:
    """Whether ``case`` fails: by its result, or because the package would refuse the call."""
    try:
        error = case(make_backend(NEWEST, **settings))
    except (AssertionError, TypeError, IndexError):
        return True
    return not error < 1e-5


def change_layout(change: Callable[[PagedLayout], PagedLayout]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def changed(*args: Any, **kwargs: Any) -> PagedLayout:
            return change(page_layout(*args, **kwargs))

        monkeypatch.setattr(flashinfer, "page_layout", changed)
        monkeypatch.setattr(flashinfer_tree, "page_layout", changed)

    return patch


def longer_last_page(layout: PagedLayout) -> PagedLayout:
    lens = np.minimum(layout.last_page_lens_B + 1, layout.page_size)
    return replace(layout, last_page_lens_B=lens.astype(np.int32))


def pages_in_another_order(layout: PagedLayout) -> PagedLayout:
    return replace(layout, page_ids_P=layout.page_ids_P[::-1].copy())


def wide_indices(layout: PagedLayout) -> PagedLayout:
    return replace(layout, page_ids_P=layout.page_ids_P.astype(np.int64))


def change_plan(change: Callable[[dict[str, Any]], None]) -> Patch:
    """What reaches the wrapper's ``plan``, by keyword."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        bind = flashinfer_emulator._bind

        def changed(signature: Any, args: Any, kwargs: Any) -> dict[str, Any]:
            given = bind(signature, args, kwargs)
            if "sm_scale" in given:
                change(given)
            return given

        monkeypatch.setattr(flashinfer_emulator, "_bind", changed)

    return patch


def host_bound(given: dict[str, Any]) -> None:
    """Lengths planned three tokens beyond what is there, within the same pages."""
    if "paged_kv_last_page_len" in given and given["page_size"] > 1:
        lens = given["paged_kv_last_page_len"] + 3
        given["paged_kv_last_page_len"] = lens.clamp(max=given["page_size"])


def hide_future_top_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tril = torch.Tensor.tril
    monkeypatch.setattr(torch.Tensor, "tril", lambda self, diagonal=0: tril(self, 0))


def natural_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    run = flashinfer_tree.TreeAttention.run

    def changed(self: Any, plan: Any, *args: Any) -> torch.Tensor:
        module = self._wrappers.module
        merge = module.merge_state
        module.merge_state = lambda a, s_a, b, s_b: merge(a, s_a * math.log(2), b, s_b)
        try:
            return run(self, plan, *args)
        finally:
            module.merge_state = merge

    monkeypatch.setattr(flashinfer_tree.TreeAttention, "run", changed)


def elements_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets that ``plan`` puts beside a packed mask are left as they are."""

    def starts(mask_BM: torch.Tensor) -> torch.Tensor:
        count = len(mask_BM)
        return torch.arange(count + 1, dtype=torch.int32) * (mask_BM.shape[1] * 8)

    monkeypatch.setattr(flashinfer_tree, "_byte_starts", starts)


def masks_highest_bit_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = flashinfer_tree.pack_mask
    monkeypatch.setattr(
        flashinfer_tree,
        "pack_mask",
        lambda visible: pack(visible.flatten(1).flip(1).view(visible.shape)),
    )


def keep_plans(key: Callable[[Any], Any]) -> Patch:
    """A plan is used again for a batch with the same key (K/V are written right)."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        plan = FlashInferBackend.plan
        kept: dict[Any, FlashInferPlan] = {}

        def changed(self: FlashInferBackend, batch: Any, table: Any) -> FlashInferPlan:
            if key(batch) not in kept:
                kept[key(batch)] = plan(self, batch, table)
            kept[key(batch)].write_slots_N = batch.write_slots_N
            return kept[key(batch)]

        monkeypatch.setattr(FlashInferBackend, "plan", changed)

    return patch


def no_wait_before_planning_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_emulator.EmulatedEvent, "synchronize", lambda self: None)


def xqa_mask_without_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = flashinfer_xqa.causal_block_mask
    monkeypatch.setattr(
        flashinfer_xqa,
        "causal_block_mask",
        lambda count, q_len: (mask(count, q_len).int() >> 1).to(torch.uint16),
    )


def drop(name: str) -> Patch:
    """The argument is not given: the package's default counts."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        plan = Wrappers.plan

        def changed(self: Wrappers, wrapper: Any, *args: Any, **kwargs: Any) -> None:
            real = wrapper.kernel.plan
            wrapper.kernel.plan = lambda *a, **k: real(
                *a, **{key: value for key, value in k.items() if key != name}
            )
            try:
                plan(self, wrapper, *args, **kwargs)
            finally:
                del wrapper.kernel.plan

        monkeypatch.setattr(Wrappers, "plan", changed)

    return patch


XQA = {"use_xqa": True}
IN_FLIGHT = {"stream": "slow"}
MUTANTS: dict[str, tuple[Patch, Case, dict[str, Any]]] = {
    "last page one longer": (change_layout(longer_last_page), decode_steps, {}),
    "last page one longer, XQA": (change_layout(longer_last_page), decode_steps, XQA),
    "pages in another order": (change_layout(pages_in_another_order), mixed_rows, {}),
    "indices of 64 bits": (change_layout(wide_indices), mixed_rows, {}),
    "causal top-left": (hide_future_top_left, verify_steps, {}),
    "not causal": (drop("causal"), verify_steps, {}),
    "dtypes left to the default": (drop("q_data_type"), verify_steps, {}),
    "host bound, FA3": (change_plan(host_bound), verify_steps, {}),
    "host bound, FA2": (change_plan(host_bound), verify_steps, {"auto": "fa2"}),
    "natural logarithm": (natural_lse, tree_rows, {}),
    "elements for bytes": (elements_for_bytes, tree_rows, {}),
    "mask bits in another order": (masks_highest_bit_first, tree_rows, {}),
    "plan of the step before": (keep_plans(lambda batch: batch.q_lens), verify_steps, {}),
    "plan of other pages": (keep_plans(lambda batch: batch.kv_lens), verify_after_a_swap, {}),
    "planned while being copied": (no_wait_before_planning_again, decode_steps, IN_FLIGHT),
    "XQA mask without the row itself": (xqa_mask_without_itself, verify_steps, XQA),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, case, settings = MUTANTS[name]
    if settings is IN_FLIGHT:
        stream = EmulatedStream()
        stream.runs_by_itself = False
        monkeypatch.setattr("runtime.attention.flashinfer_wrappers._MAX_TURNS", 1)
        settings = {"stream": stream}
    assert not notices(case, **settings), "the case fails without a fault"
    if "stream" in settings:
        settings["stream"].in_flight.clear()
    patch(monkeypatch)
    assert notices(case, **settings)

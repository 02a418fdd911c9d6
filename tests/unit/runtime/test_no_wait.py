"""The guard must catch every kind of wait, and let the decode path's own operators through."""

from __future__ import annotations

import pytest
import torch

from runtime.no_wait import DeviceWaitError, no_wait

WAITS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "one_argument_where": lambda x: torch.where(x > 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "boolean_mask_read": lambda x: x[x > 1],
    "boolean_mask_write": lambda x: x.__setitem__(x > 1, 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "truth_value": lambda x: bool(x[0] > 0),
    "if_statement": lambda x: 1 if x[0] > 0 else 2,
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "index": lambda x: [0, 1, 2, 3][x[0]],
    "shape_from_value": lambda x: torch.zeros(int(x[0])),
    "slice_from_value": lambda x: x[: x[0]],
    "array": lambda x: __import__("numpy").asarray(x),
    "contains": lambda x: 3 in x,
    "equal": lambda x: torch.equal(x, x),
    "argwhere": lambda x: torch.argwhere(x),
    "format": lambda x: f"{x[0]}",
    "format_many": lambda x: f"{x}",
    "repr": lambda x: repr(x),
    "to_cpu": lambda x: x.to("cpu"),
    "to_cpu_device": lambda x: x.to(torch.device("cpu"), torch.float32),
    "to_cpu_keyword": lambda x: x.to(device="cpu", non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_guard_catches(name: str) -> None:
    values = torch.tensor([1, 2, 3])
    WAITS[name](values.clone())
    with no_wait(), pytest.raises(DeviceWaitError):
        WAITS[name](values.clone())


def test_guard_lets_device_code_through() -> None:
    values = torch.tensor([1, 2, 3])
    with no_wait():
        total = torch.where(values > 1, values, 0).cumprod(0).sum()
        picked = values.index_select(0, torch.tensor([0, 2]))
        spread = torch.repeat_interleave(values, torch.tensor([1, 1, 1]), output_size=3)
        values.scatter_(0, torch.tensor([1]), torch.tensor([9]))
        masked = values.masked_fill(values > 2, -1)
        assert values.to(torch.float32).dtype is torch.float32
        assert values.to(dtype=torch.float32, copy=True).dtype is torch.float32
    assert total.item() == 0
    assert picked.tolist() == [1, 3]
    assert spread.tolist() == [1, 2, 3]
    assert masked.tolist() == [1, -1, -1]

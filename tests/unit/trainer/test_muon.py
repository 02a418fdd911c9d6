"""Muon: torch's own on whole matrices is the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mtp_train.muon import GatedMuon, make_muon, orthogonalise
from runtime.parallel import SingleProcessGroup

RATE = 0.03


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"proj.weight": (24, 16), "mlp.weight": (16, 40), "norm.weight": (16,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def muon(named: dict[str, nn.Parameter], *, decay: float = 0.0) -> GatedMuon:
    return make_muon(
        named.items(),
        learning_rate=RATE,
        weight_decay=decay,
        betas=(0.9, 0.95),
        ranks=SingleProcessGroup(torch.device("cpu")),
    )


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matrices_step_as_torchs_muon_and_vectors_as_adamw(decay: float) -> None:
    ours, theirs = parameters(), parameters()
    matrices = [p for p in theirs.values() if p.dim() == 2]
    reference = torch.optim.Muon(
        matrices, lr=RATE, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    vectors = torch.optim.AdamW(
        [theirs["norm.weight"]], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    optimizer = muon(ours, decay=decay)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
        vectors.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=2e-2, atol=2e-3)


def test_singular_values_come_out_about_one() -> None:
    for shape in ((24, 16), (16, 24), (16, 16)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonalise(matrix))
        assert values.min() > 0.5
        assert values.max() < 1.3
    assert not orthogonalise(torch.zeros(4, 8)).any(), "no gradient, no step"


def test_nothing_changes_while_the_gate_is_closed() -> None:
    named = parameters()
    optimizer = muon(named)
    set_gradients(named, 0)
    optimizer.step()
    kept = {n: p.detach().clone() for n, p in named.items()}
    momentum = optimizer.state[named["mlp.weight"]]["momentum_buffer"].clone()
    set_gradients(named, 1)
    optimizer.is_closed = True
    optimizer.step()
    assert all(torch.equal(p, kept[n]) for n, p in named.items())
    assert torch.equal(optimizer.state[named["mlp.weight"]]["momentum_buffer"], momentum)


def test_the_rows_of_an_own_lm_head_are_not_a_matrix_to_muon() -> None:
    named = {"lm_head.weight": nn.Parameter(torch.zeros(8, 4))}
    groups = muon(named).param_groups
    assert "matrix_shape" not in groups[0]
    assert groups[0]["rate_share"] < 1


def test_goes_on_from_its_state() -> None:
    named, others = parameters(), parameters(seed=3)
    optimizer, restored = muon(named), muon(others)
    for step in range(2):
        set_gradients(named, step)
        optimizer.step()
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, parameter in others.items():
        parameter.data.copy_(named[name])
    for parameters_of in (named, others):
        set_gradients(parameters_of, 2)
    optimizer.step()
    restored.step()
    assert all(torch.equal(p, others[n]) for n, p in named.items())

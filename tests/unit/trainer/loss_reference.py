"""Every loss between two distributions written down plainly, in float64, for autograd."""

from __future__ import annotations

import torch

KINDS = ("soft_ce", "forward_kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda")


def row_losses(kind: str, log_p: torch.Tensor, log_q: torch.Tensor, *, eta: float) -> torch.Tensor:
    """One loss per row of log-probabilities ``[A, V]``."""
    p, q = log_p.exp(), log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    divergence = (p * (log_p - log_q)).sum(-1)
    if kind == "soft_ce":
        return -(p * log_q).sum(-1)
    if kind == "forward_kl":
        return divergence
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "tv":
        return 0.5 * (p - q).abs().sum(-1)
    if kind == "lk_alpha":
        return -overlap.log()
    assert kind == "lk_lambda"
    weight = torch.exp(-eta * overlap.detach())
    return weight * divergence + (1 - weight) * (1 - overlap)


def log_distribution(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden.double() @ lm_head.double().t(), -1)


def merge_outside(log_p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The kept ids and one bucket with the mass of all others."""
    outside = torch.ones(log_p.shape[-1], dtype=torch.bool)
    outside[kept] = False
    rest = torch.logsumexp(log_p[:, outside], -1, keepdim=True)
    return torch.cat((log_p[:, kept], rest), -1)


def sampled_distribution(
    hidden: torch.Tensor, lm_head: torch.Tensor, kept: torch.Tensor, sample: torch.Tensor
) -> torch.Tensor:
    """The head's, with the mass outside estimated from the sampled ids."""
    logits = hidden.double() @ lm_head.double().t()
    num_outside = lm_head.shape[0] - len(kept)
    rest = torch.logsumexp(logits[:, sample], -1, keepdim=True)
    rest = rest + torch.tensor(num_outside / len(sample), dtype=torch.float64).log()
    return torch.log_softmax(torch.cat((logits[:, kept], rest), -1), -1)

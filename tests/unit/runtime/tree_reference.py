"""Draft trees the slow way: one path at a time, every forward from scratch, chosen in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from runtime.batch import BatchMode, build_batch, upload_ids
from runtime.kv_cache import SlotTable
from runtime.models.base import DraftModel, Model
from runtime.spec.tree_shape import TreeShape

Path = tuple[int, ...]
LogitsOf = Callable[[Path], torch.Tensor]  # what the head says after this path, [W]


def path_logits(target: Model, head: DraftModel, tokens: Sequence[int]) -> LogitsOf:
    """The head's logits after ``tokens`` (the last one not processed) and any drafted path."""
    length, known = len(tokens) - 1, list(tokens)
    cache: dict[Path, torch.Tensor] = {}

    @torch.inference_mode()
    def logits_of(path: Path) -> torch.Tensor:
        if path in cache:
            return cache[path]
        pages = -(-(length + len(path)) // 16)
        table = SlotTable(num_rows=1, max_len=pages * 16, page_size=16, num_pages=pages)
        row = table.acquire_row()
        table.reserve(row, length + len(path))
        pools = {model: model.new_pool(pages * 16) for model in (target, head)}

        def forward(
            model: Model, start: int, ids: Sequence[int], hidden: torch.Tensor | None
        ) -> torch.Tensor:
            batch = build_batch(
                BatchMode.PREFILL,
                table=table,
                table_rows=[row],
                starts=[start],
                q_lens=[len(ids)],
                input_ids_N=upload_ids(ids, target.device),
                device=target.device,
                hidden_ND=hidden,
            )
            return model.forward(batch, table, pools[model])

        hidden = forward(target, 0, known[:length], None)
        state = forward(head, 0, known[1:], hidden)[-1:]
        for offset, token in enumerate(path):
            state = forward(head, length + offset, [token], state)
        cache[path] = head.logits(state)[0].float()
        return cache[path]

    return logits_of


def slow_fixed_tree(shape: TreeShape, logits_of: LogitsOf) -> tuple[tuple[int, ...], ...]:
    """Node ids and parents' rows of a shape."""
    paths: list[Path] = [()]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        order = logits_of(paths[parent]).sort(descending=True, stable=True).indices
        paths.append((*paths[parent], int(order[rank])))
    return tuple(path[-1] for path in paths[1:]), shape.parents


def slow_dynamic_tree(
    num_nodes: int, *, depth: int, top_k: int, logits_of: LogitsOf
) -> tuple[tuple[int, ...], ...]:
    """Node ids and parents' rows: breadth first, siblings by falling probability."""
    scores: dict[Path, float] = {(): 0.0}
    order: list[Path] = []
    expanded: list[Path] = [()]
    for _ in range(depth):
        level: list[Path] = []
        for path in expanded:
            logp = logits_of(path).log_softmax(-1)
            for token in logp.sort(descending=True, stable=True).indices[:top_k].tolist():
                scores[(*path, token)] = scores[path] + float(logp[token])
                level.append((*path, token))
        order.extend(level)
        expanded = sorted(level, key=lambda path: -scores[path])[:top_k]
    chosen = set(sorted(order, key=lambda path: -scores[path])[:num_nodes])
    nodes = [path for path in order if path in chosen]
    rows = {path: row for row, path in enumerate([(), *nodes])}
    return tuple(path[-1] for path in nodes), tuple(rows[path[:-1]] for path in nodes)

"""Which nodes a tree has, who sees whom, and the walk through it, against plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from runtime.request import SamplingParams
from runtime.sampling import SamplingTensors, Stream, sample, top_candidates
from runtime.spec.tree_draft import DraftTree, DynamicGrower, FixedGrower, LevelRows
from runtime.spec.tree_shape import fixed_tree, visible_rows
from runtime.verify_tree import verify_tree, walk_tree
from tests.unit.runtime.model_fixtures import fused_kernels
from tests.unit.runtime.tree_reference import Path, slow_dynamic_tree, slow_fixed_tree

CPU = torch.device("cpu")
RATES = (0.5, 0.2, 0.1)


@pytest.mark.parametrize(("num_nodes", "depth"), [(1, 1), (5, 2), (12, 4), (39, 3), (100, 3)])
def test_a_fixed_tree_has_the_likeliest_nodes(num_nodes: int, depth: int) -> None:
    shape = fixed_tree(num_nodes, depth=depth, rates=RATES)
    every = [
        math.prod(RATES[rank] for rank in path)
        for length in range(1, depth + 1)
        for path in itertools.product(range(len(RATES)), repeat=length)
    ]
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((*paths[parent], rank))
    chances = sorted((math.prod(RATES[rank] for rank in path) for path in paths[1:]), reverse=True)
    best = sorted(every, reverse=True)[:num_nodes]
    assert chances == pytest.approx(best)
    assert len(set(paths)) == len(paths) == min(num_nodes, len(every)) + 1
    assert shape.depths == tuple(len(path) for path in paths[1:])
    assert list(shape.depths) == sorted(shape.depths), "not in breadth-first order"


def test_one_candidate_per_node_is_a_chain() -> None:
    shape = fixed_tree(3, depth=5, rates=(0.9,))
    assert shape.parents == (0, 1, 2)
    assert shape.expanded_rows(1) == (1,)
    assert shape.expanded_rows(3) == ()


def test_rows_see_themselves_and_their_ancestors() -> None:
    parents = torch.tensor([[0, 0, 1, 1, 3], [0, 1, 2, 0, 4]])
    got = visible_rows(parents, 3)
    for tree, rows in zip(got, parents.tolist(), strict=True):
        for row in range(6):
            seen, at = {row}, row
            while at:
                at = rows[at - 1]
                seen.add(at)
            assert set(tree[row].nonzero()[:, 0].tolist()) == seen


# -- growing ---------------------------------------------------------------------------------------


class TableHead:
    """A head whose logits are a random function of request and path, without a model."""

    def __init__(self, *, vocab: int, seed: int, sharpness: float = 1.0) -> None:
        self.vocab, self.seed, self.sharpness = vocab, seed, sharpness
        self.paths: list[list[list[Path]]] = []  # per level and request
        self.levels: list[LevelRows] = []

    def logits(self, request: int, path: Path) -> torch.Tensor:
        number = hash((self.seed, request, path)) % 2**31
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.vocab, generator=generator) * self.sharpness

    def state(self, request: int, path: Path) -> torch.Tensor:
        """A state that says which path it belongs to."""
        padded = [request, len(path), *path] + [0] * 8
        return torch.tensor(padded[:8]).float()

    def run_level(self, depth: int, rows: LevelRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Checks that every row gets its parent's state and sees its own path, no more."""
        count, num_rows = rows.ids_BS.shape
        states = torch.zeros(count, num_rows, 8)
        logits = torch.zeros(count, num_rows, self.vocab)
        self.paths.append([])
        for b in range(count):
            level = []
            for s in range(num_rows):
                request, length, *tokens = rows.hidden_BSD[b, s].long().tolist()
                assert (request, length) == (b, depth - 1)
                path = (*tokens[:length], int(rows.ids_BS[b, s]))
                level.append(path)
                states[b, s], logits[b, s] = self.state(b, path), self.logits(b, path)
            self.paths[-1].append(level)
            so_far = [path for levels in self.paths for path in levels[b]]
            for s, path in enumerate(level):
                seen = {so_far[j] for j in rows.visible_BSJ[b, s].nonzero()[:, 0].tolist()}
                assert seen == {path[:n] for n in range(1, depth + 1)}
        return states, logits


@pytest.mark.parametrize(("num_nodes", "depth"), [(3, 1), (6, 2), (12, 4), (60, 4)])
def test_fixed_growth_fills_the_shape(num_nodes: int, depth: int) -> None:
    head = TableHead(vocab=17, seed=3)
    shape = fixed_tree(num_nodes, depth=depth, rates=RATES)
    grower = FixedGrower(shape, device=CPU)
    tree = grow(grower, head, requests=2)
    for b in range(2):
        ids, parents = slow_fixed_tree(shape, lambda path, b=b: head.logits(b, path))
        assert tree.ids_BN[b].tolist() == list(ids)
        assert tree.parents_BN[b].tolist() == list(parents)
    check_rows(grower, head, tree)


@pytest.mark.parametrize("sharpness", [0.3, 3.0])
@pytest.mark.parametrize(
    ("num_nodes", "depth", "top_k"), [(1, 1, 1), (4, 1, 4), (9, 3, 3), (16, 5, 4), (500, 3, 4)]
)
def test_dynamic_growth_keeps_the_best_paths(
    num_nodes: int, depth: int, top_k: int, sharpness: float
) -> None:
    head = TableHead(vocab=17, seed=5, sharpness=sharpness)
    grower = DynamicGrower(num_nodes, depth=depth, top_k=top_k, device=CPU)
    tree = grow(grower, head, requests=3)
    for b in range(3):
        ids, parents = slow_dynamic_tree(
            num_nodes,
            depth=depth,
            top_k=top_k,
            logits_of=lambda path, b=b: head.logits(b, path),
        )
        assert tree.ids_BN[b].tolist() == list(ids)
        assert tree.parents_BN[b].tolist() == list(parents)
    check_rows(grower, head, tree)


def test_ties_between_parent_and_child_never_orphan_a_node() -> None:
    """A certain head gives a path of probability one: every prefix of it has the same score."""
    head = TableHead(vocab=6, seed=1, sharpness=1e4)
    grower = DynamicGrower(3, depth=5, top_k=2, device=CPU)
    tree = grow(grower, head, requests=8)
    assert tree.parents_BN.tolist() == [[0, 1, 2]] * 8
    assert tree.depths_BN.tolist() == [[1, 2, 3]] * 8


def grow(grower: FixedGrower | DynamicGrower, head: TableHead, *, requests: int) -> DraftTree:
    hidden = torch.stack([head.state(b, ()) for b in range(requests)])
    logits = torch.stack([head.logits(b, ()) for b in range(requests)])
    if isinstance(grower, DynamicGrower):
        return grower.grow(hidden, logits, head.run_level)

    def run_level(depth: int, rows: LevelRows) -> tuple[torch.Tensor, torch.Tensor]:
        states, logits = head.run_level(depth, rows)
        return states, best(logits)

    return grower.grow(hidden, best(logits), run_level)


def best(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(len(RATES), dim=-1).indices


def check_rows(grower: FixedGrower | DynamicGrower, head: TableHead, tree: DraftTree) -> None:
    """What the host plans with is what was run, and depths are those of the parents."""
    sizes = [len(level[0]) for level in head.paths]
    assert (sum(sizes), max(sizes, default=0)) == (grower.num_draft_rows, grower.max_level_rows)
    assert tree.ids_BN.shape[1] == grower.num_nodes
    for parents, depths in zip(tree.parents_BN.tolist(), tree.depths_BN.tolist(), strict=True):
        for parent, depth in zip(parents, depths, strict=True):
            assert depth == (depths[parent - 1] + 1 if parent else 1)


def test_candidates_have_their_log_probabilities() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 9 + 300
    ids, scores = top_candidates(logits, 4)
    want = logits.double().log_softmax(-1).topk(4)
    assert torch.equal(ids, want.indices)
    assert torch.allclose(scores.double(), want.values, atol=1e-4)


# -- the walk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_the_walk_follows_the_targets_own_draws(temperature: float) -> None:
    vocab, depth, count = 5, 3, 64
    generator = torch.Generator().manual_seed(0)
    shape = fixed_tree(11, depth=depth, rates=RATES)
    parents = torch.tensor([shape.parents]).expand(count, -1)
    ids = torch.tensor(  # siblings differ
        [
            [(3 * parent + rank + shift) % vocab for parent, rank in zip(
                shape.parents, shape.ranks, strict=True)]
            for shift in torch.randint(0, vocab, (count,), generator=generator).tolist()
        ]
    )  # fmt: skip
    logits = torch.randn(count, 12, vocab, generator=generator) * 2
    params = [SamplingParams(temperature=temperature, top_k=4, seed=b) for b in range(count)]
    sampling = SamplingTensors.build(params, CPU)
    first = torch.arange(10, 10 + count)
    got = verify_tree(logits, ids, parents, sampling, first, depth=depth)
    lengths = set()
    for b in range(count):
        row, path, tokens = 0, [0], []
        while True:
            own = SamplingTensors.build([params[b]], CPU)
            position = torch.tensor([10 + b + len(tokens)])
            token = int(sample(logits[b, row][None], own, position, Stream.TARGET))
            tokens.append(token)
            children = [
                node + 1
                for node in range(11)
                if shape.parents[node] == row and int(ids[b, node]) == token
            ]
            if not children:
                break
            (row,) = children
            path.append(row)
        count_b = len(tokens)
        lengths.add(count_b)
        assert int(got.num_emitted_B[b]) == count_b
        assert got.ids_BE[b].tolist() == tokens + [-1] * (depth + 1 - count_b)
        assert int(got.last_ids_B[b]) == tokens[-1]
        assert got.path_BE[b, :count_b].tolist() == path
        assert got.path_BE[b, count_b:].tolist() == list(range(count_b, depth + 1))
        assert got.tokens_BE[b, count_b:].tolist() == [tokens[-1]] * (depth + 1 - count_b)
    assert lengths == {1, 2, 3, 4}, "the trees of this seed do not show every length"


def test_the_kernel_walks_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(5)
    shape = fixed_tree(9, depth=3, rates=RATES)
    parents = torch.tensor([shape.parents]).expand(300, -1)
    ids = torch.randint(0, 3, (300, 9), generator=generator)
    tokens = torch.randint(0, 3, (300, 10), generator=generator)
    want = walk_tree(tokens, ids, parents, 3)
    got = fused_kernels().walk_tree(tokens, ids, parents, 3)
    for name in ("ids_BE", "tokens_BE", "path_BE", "num_emitted_B", "last_ids_B"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert set(want.num_emitted_B.tolist()) == {1, 2, 3, 4}

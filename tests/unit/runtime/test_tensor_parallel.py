"""A target and its head over several ranks against the same ones on one: equal tokens in fp32.

Ranks are threads here; `tests/distributed` runs the same over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import sharding
from runtime.batch import BatchMode, build_batch, upload_ids
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import DraftVocab, HeadSpec, hash_vocab_ids
from runtime.kv_cache import SlotTable
from runtime.layer_parts import LatentSpec
from runtime.linear import PlainLinear
from runtime.models.base import Model
from runtime.models.heads import build_head
from runtime.models.loader import Target, load_target
from runtime.request import Phase, Request, SamplingParams
from runtime.sharding import HeadShare, Shard, share_heads
from runtime.spec.base import PlainSchedule
from runtime.spec.mtp import MtpSchedule
from tests.unit.runtime.engine_fixtures import (
    EOS,
    OTHER_HEADS,
    VOCAB,
    head_spec,
    make_requests,
    random_head_tensors,
    run_stepwise,
)
from tests.unit.runtime.model_fixtures import random_ids, relative_error, save_model
from tests.unit.runtime.thread_group import ThreadGroup, run_ranks

CPU = torch.device("cpu")
SMOLLM2 = "smollm2-135m-instruct"

# Heads that divide, that must be replicated, that must be filled up; widths that do not divide.
SHAPES: dict[str, dict[str, Any]] = {
    "even": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "few_kv_heads": {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 36},
    "three_kv_heads": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 36,
        "intermediate_size": 50,
        "tie_word_embeddings": True,
    },
    "biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "intermediate_size": 45,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen2": {"family": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_one_kv_head": {
        "family": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
    "qwen3_moe": {"family": "qwen3moe", "moe_intermediate_size": 10},
    "deepseek_v2": {"family": "deepseekv2"},
    "deepseek_v3": {
        "family": "deepseekv3",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 36,
        "moe_intermediate_size": 11,
    },
}
WIDTHS = (2, 4)


@dataclass(frozen=True)
class Case:
    """One target with a random head, loaded whole; ``load(group)`` loads a rank's part."""

    path: Path
    whole: Target
    spec: HeadSpec
    tensors: dict[str, torch.Tensor]

    def load(self, group: ThreadGroup) -> Target:
        return load_target(str(self.path), dtype=torch.float32, device=CPU, group=group)


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("target"), request.param)


def make_case(path: Path, shape: str, **overrides: Any) -> Case:
    save_model(path, **{"family": "llama", "vocab_size": VOCAB, **SHAPES[shape]})
    return open_case(path, **overrides)


def open_case(path: Path, **overrides: Any) -> Case:
    """The target in ``path``, loaded whole, and its random head."""
    whole = load_target(str(path), dtype=torch.float32, device=CPU)
    spec = head_spec(whole, **overrides)
    return Case(path, whole, spec, random_head_tensors(spec))


def make_engine(case: Case, target: Target, *, draft: bool, **overrides: Any) -> Engine:
    values: dict[str, Any] = {
        "num_pages": 64,
        "max_running": 4,
        "max_model_len": 96,
        "max_batch_tokens": 32,
        "check_integrity": True,
        "num_draft_tokens": 3 if draft else 0,
    }
    head = build_head(case.spec, case.tensors, target.model) if draft else None
    return Engine(
        target.model,
        config=EngineConfig(**{**values, **overrides}),
        eos_token_ids=(EOS,),
        draft=head,
    )


def lead(
    case: Case,
    width: int,
    function: Callable[[Engine, list[Engine]], Any],
    *,
    draft: bool = False,
    prepare: Callable[[Engine, ThreadGroup], None] | None = None,
    **overrides: Any,
) -> Any:
    """``function(engine, every rank's engine)`` on the leader while the others follow."""
    engines: list[Any] = [None] * width

    def live(group: ThreadGroup) -> Any:
        target = case.load(group)
        engine = engines[group.rank] = make_engine(case, target, draft=draft, **overrides)
        if prepare is not None:
            prepare(engine, group)
        group.barrier()
        if not group.is_leader:
            return engine.follow()
        result = function(engine, engines)
        engine.dismiss()
        return result

    return run_ranks(width, live)[0]


def decode(requests: Sequence[Request], **options: Any) -> Callable[[Engine, Any], Any]:
    return lambda engine, engines: run_stepwise(engine, list(requests), **options)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_states_and_logits_are_those_of_one_rank(case: Case, width: int) -> None:
    sequences = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (1, 40, 17)]
    whole = make_engine(case, case.whole, draft=False)

    def states(engine: Engine, _: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {
            rows.key: (rows.hidden_TD, engine.logits(rows.hidden_TD))
            for rows in engine.forward_hidden(sequences)
        }

    wanted = states(whole, None)
    got = lead(case, width, states)
    for key, (hidden, logits) in wanted.items():
        torch.testing.assert_close(got[key][0], hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[key][1], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "decode_path"), [(2, True), (4, False)])
def test_scores_are_those_of_one_rank(case: Case, width: int, decode_path: bool) -> None:
    sequences = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (30, 1, 9)]

    def score(engine: Engine, _: Any) -> list[torch.Tensor]:
        return engine.score(sequences, decode_path=decode_path)

    wanted = score(make_engine(case, case.whole, draft=False), None)
    for got, want in zip(lead(case, width, score), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "temperature"), [(2, 0.9), (4, 0.0), (4, 0.9)])
def test_plain_decoding_gives_the_tokens_of_one_rank(
    case: Case, width: int, temperature: float
) -> None:
    """Late arrivals, chunked prompts, and too few pages for everybody."""
    requests = make_requests(6, temperature=temperature, ignore_eos=True)
    overrides: dict[str, Any] = {"page_size": 4, "num_pages": 24}
    alone = make_engine(case, case.whole, draft=False, **overrides)
    wanted = run_stepwise(alone, requests, late=True)
    assert alone.scheduler.num_preemptions > 0
    assert lead(case, width, decode(requests, late=True), **overrides) == wanted


@pytest.mark.parametrize(("width", "temperature"), [(2, 0.9), (4, 0.0), (4, 0.9)])
def test_speculation_gives_the_tokens_and_the_drafts_of_one_rank(
    case: Case, width: int, temperature: float
) -> None:
    requests = make_requests(6, temperature=temperature, ignore_eos=True)
    plain = run_stepwise(make_engine(case, case.whole, draft=False), requests)

    def generate(engine: Engine, _: Any) -> list[Any]:
        return engine.generate(requests)

    alone = generate(make_engine(case, case.whole, draft=True), None)
    spread = lead(case, width, generate, draft=True)
    assert spread == alone
    assert {one.request_id: list(one.output_ids) for one in spread} == plain
    if temperature:
        assert any(step.num_accepted for one in spread for step in one.steps)


@pytest.mark.parametrize("changes", OTHER_HEADS.values(), ids=OTHER_HEADS.keys())
def test_another_head_drafts_as_on_one_rank(changes: dict[str, Any], tmp_path: Path) -> None:
    case = make_case(tmp_path, "even", **changes)
    requests = make_requests(6, temperature=0.9, ignore_eos=True)
    alone = make_engine(case, case.whole, draft=True).generate(requests)
    assert any(step.num_accepted for one in alone for step in one.steps)
    assert lead(case, 2, lambda engine, _: engine.generate(requests), draft=True) == alone


@pytest.mark.parametrize(("width", "page_size"), [(2, 16), (4, 1)])
def test_after_every_step_the_draft_state_is_that_of_a_whole_head(
    case: Case, width: int, page_size: int
) -> None:
    whole = Recompute(case, width)
    requests = make_requests(4, temperature=0.9, ignore_eos=True, max_tokens=14)

    def run(engine: Engine, engines: list[Engine]) -> Any:
        return run_stepwise(
            engine, requests, late=True, after_step=lambda e: whole.check(e, engines)
        )

    lead(case, width, run, draft=True, page_size=page_size, num_pages=1024 // page_size)
    assert whole.num_checked > 20


class Recompute:
    """Relay state of the leader and K/V of every rank against whole models, from scratch."""

    def __init__(self, case: Case, width: int) -> None:
        self.target = case.whole.model
        self.head = build_head(case.spec, case.tensors, self.target)
        self.num_checked = 0
        config = case.whole.config
        shares = [
            share_heads(config.num_heads, config.num_kv_heads, rank=rank, world_size=width)
            for rank in range(width)
        ]
        whole = (0,)  # a latent cache, on every rank
        self._draft_heads, self._target_heads = (
            [whole if latent else share.kv for share in shares]
            for latent in (case.spec.latent, config.latent)
        )

    @torch.inference_mode()
    def check(self, engine: Engine, engines: Sequence[Engine]) -> None:
        for state in engine.scheduler.running:
            if state.phase is Phase.DECODE:
                self._check(engine, engines, state.row, state.tokens, state.committed)
                self.num_checked += 1

    def _check(
        self, engine: Engine, engines: Sequence[Engine], row: int, tokens: list[int], length: int
    ) -> None:
        table = SlotTable(num_rows=1, max_len=length, page_size=1, num_pages=length)
        table.reserve(table.acquire_row(), length)
        pools = {model: model.new_pool(length) for model in (self.target, self.head)}

        def forward(model: Model, ids: list[int], hidden: torch.Tensor | None) -> torch.Tensor:
            batch = build_batch(
                BatchMode.PREFILL,
                table=table,
                table_rows=[0],
                starts=[0],
                q_lens=[length],
                input_ids_N=upload_ids(ids, CPU),
                device=CPU,
                hidden_ND=hidden,
            )
            return model.forward(batch, table, pools[model])

        hidden = forward(self.target, tokens[:length], None)
        drafted = forward(self.head, tokens[1 : length + 1], hidden)
        schedule = engine.schedule
        assert isinstance(schedule, MtpSchedule)
        close(schedule.hidden_RD[row], drafted[-1])
        logits = self.head.logits(drafted[-1:])[0]
        close(logits[schedule.drawn_from_RX[row]], logits.max()[None])
        assert int(schedule.last_ids_R[row]) == tokens[length]
        for rank, other in enumerate(engines):
            theirs = other.schedule
            assert isinstance(theirs, MtpSchedule)
            held = other.table.slots(row, 0, length)
            assert torch.equal(held, engine.table.slots(row, 0, length))
            for model, pool, heads in (
                (self.target, theirs.target.pool, self._target_heads[rank]),
                (self.head, theirs.draft.pool, self._draft_heads[rank]),
            ):
                for whole_LTGC, mine_LTGC in ((pools[model].k, pool.k), (pools[model].v, pool.v)):
                    for local, head in enumerate(heads):
                        got = mine_LTGC[-1][held][:, local]
                        want = whole_LTGC[-1][:, head] if head >= 0 else torch.zeros_like(got)
                        close(got, want)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = float(want.abs().max().clamp_min(1e-6))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hot_vocabulary_is_spread_too(tmp_path: Path, width: int) -> None:
    ids = torch.tensor([0, 2, 3, 6, 7, 9, 10])
    vocab = DraftVocab(size=7, coverage=1.0, ids_sha256=hash_vocab_ids(ids))
    case = make_case(tmp_path, "three_kv_heads", draft_vocab=vocab)
    case.tensors["draft_vocab_ids"] = ids
    requests = make_requests(6, temperature=0.9)

    def generate(engine: Engine, _: Any) -> list[Any]:
        return engine.generate(requests)

    wanted = generate(make_engine(case, case.whole, draft=True), None)
    assert lead(case, width, generate, draft=True) == wanted


def test_forward_draft_is_that_of_one_rank(case: Case) -> None:
    sequences = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (3, 25)]

    def states(engine: Engine, _: Any) -> dict[str, torch.Tensor]:
        return {rows.key: rows.draft_TD for rows in engine.forward_draft(sequences)}

    wanted = states(make_engine(case, case.whole, draft=True), None)
    for key, got in lead(case, 2, states, draft=True).items():
        torch.testing.assert_close(got, wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draft", [False, True])
def test_a_step_is_one_broadcast_of_host_memory(tmp_path: Path, draft: bool) -> None:
    case = make_case(tmp_path, "even")
    counts: list[int] = []

    def run(engine: Engine, _: Any) -> int:
        group: Any = engine.target.group
        run_stepwise(
            engine,
            make_requests(4),
            after_step=lambda e: counts.append(group.calls["broadcast_host"]),
        )
        return group.calls.get("broadcast_object", 0) + group.calls.get("gather_objects", 0)

    assert lead(case, 2, run, draft=draft) == 0, "nothing is pickled on the decode path"
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("agrees", [True, False])
def test_followers_use_the_tokens_that_the_leader_drew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    """A follower whose kernels draw something else is overruled; left alone, it goes astray."""
    case = make_case(tmp_path, "even")
    requests = make_requests(5, max_tokens=30)
    wanted = run_stepwise(make_engine(case, case.whole, draft=False), requests)
    if not agrees:
        monkeypatch.setattr(PlainSchedule, "agree", lambda self, *drawn: None)

    def disturb(engine: Engine, group: ThreadGroup) -> None:
        if not group.is_leader:
            gather = engine.target.vocabulary.gather  # type: ignore[attr-defined]
            engine.target.vocabulary.gather = lambda x: -gather(x)  # type: ignore[attr-defined]

    got = lead(case, 2, decode(requests), draft=True, prepare=disturb)
    assert (got == wanted) == agrees


def test_only_the_first_rank_takes_requests(tmp_path: Path) -> None:
    case = make_case(tmp_path, "even")

    def live(group: ThreadGroup) -> str:
        engine = make_engine(case, case.load(group), draft=False)
        ask = engine.follow if group.is_leader else lambda: engine.generate(make_requests(1))
        with pytest.raises(ValueError, match="rank") as refused:
            ask()
        return str(refused.value)

    first, second = run_ranks(2, live)
    assert first == "follow: rank 0 of the group leads"
    assert "rank 1 of the group follows" in second


def test_an_aborted_request_and_a_failed_one_leave_the_team_usable(tmp_path: Path) -> None:
    case = make_case(tmp_path, "even")
    requests = make_requests(4)
    wanted = run_stepwise(make_engine(case, case.whole, draft=True), requests)

    def run(engine: Engine, _: Any) -> Any:
        engine.add(Request("gone", (3, 4, 5)))
        engine.step()
        engine.step()
        engine.abort("gone")
        with pytest.raises(ValueError, match="prompt_ids is empty"):
            engine.generate([Request("empty", ())])
        return run_stepwise(engine, requests)

    assert lead(case, 2, run, draft=True) == wanted


def add_bias_everywhere(engine: Engine, group: ThreadGroup) -> None:
    for block in engine.target.blocks:  # type: ignore[attr-defined]
        out = block.attention.out.linear
        out._bias = group.broadcast(out._bias.clone())


def swap_vocabulary_parts(engine: Engine, group: ThreadGroup) -> None:
    gather = engine.target.vocabulary.gather  # type: ignore[attr-defined]
    engine.target.vocabulary.gather = lambda x: gather(x).flip(-1)  # type: ignore[attr-defined]


def keep_partial_sums(engine: Engine, group: ThreadGroup) -> None:
    for block in engine.target.blocks:  # type: ignore[attr-defined]
        block.mlp.down = block.mlp.down.linear


def ignore_pages(engine: Engine, group: ThreadGroup) -> None:
    if not group.is_leader:
        engine.table.adopt = lambda row, pages: None  # type: ignore[method-assign]


def forget_the_draft(engine: Engine, group: ThreadGroup) -> None:
    """Rank 1 adds nothing to the head's attention."""
    if not group.is_leader:
        out = engine.schedule.head.blocks[0].attention.out  # type: ignore[attr-defined]
        out.linear = PlainLinear(torch.zeros_like(out.dense_weight()))


@pytest.mark.parametrize(
    "fault",
    [
        add_bias_everywhere,
        swap_vocabulary_parts,
        keep_partial_sums,
        ignore_pages,
        forget_the_draft,
    ],
)
def test_a_fault_is_seen(tmp_path: Path, fault: Callable[[Engine, ThreadGroup], None]) -> None:
    """Each of these must fail the recompute of the draft's state; the last leaves the output."""
    case = make_case(tmp_path, "biases")
    requests = make_requests(4, temperature=0.9, ignore_eos=True, max_tokens=10)

    def run(engine: Engine, engines: list[Engine]) -> Any:
        whole = Recompute(case, 2)
        return run_stepwise(engine, requests, after_step=lambda e: whole.check(e, engines))

    with pytest.raises(AssertionError, match=r"Tensor-likes are not close|assert torch\.equal"):
        lead(case, 2, run, draft=True, prepare=fault)


def test_heads_beside_other_key_heads_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(*arguments: int, rank: int, world_size: int) -> HeadShare:
        share = share_heads(*arguments, rank=rank, world_size=world_size)
        if world_size == 1:
            return share
        return HeadShare(share.kv, (*share.query[1:], share.query[0]))

    case = make_case(tmp_path, "even")
    (ids,) = sequences = [random_ids(20, seed=1, vocab_size=VOCAB)]
    assert len(ids) == 20
    (want,) = make_engine(case, case.whole, draft=False).score(sequences)
    monkeypatch.setattr(sharding, "share_heads", shifted)
    (got,) = lead(case, 2, lambda engine, _: engine.score(sequences))
    assert (got - want).abs().max() > 1e-2


def test_a_head_that_reads_another_heads_latents_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = sharding._latent_shards

    def mixed(latent: LatentSpec, heads: Sequence[int]) -> dict[str, Shard]:
        name = "self_attn.kv_b_proj.weight"
        return {**cut(latent, heads), name: cut(latent, sorted(heads, reverse=True))[name]}

    case = make_case(tmp_path, "deepseek_v2")
    sequences = [random_ids(20, seed=1, vocab_size=VOCAB)]
    (want,) = make_engine(case, case.whole, draft=False).score(sequences)
    monkeypatch.setattr(sharding, "_latent_shards", mixed)
    (got,) = lead(case, 2, lambda engine, _: engine.score(sequences))
    assert (got - want).abs().max() > 1e-2


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["mtp", "fixed_tree", "dynamic_tree"])
def test_smollm2_over_three_ranks_is_smollm2(schedule: str) -> None:
    """Three key/value heads, one per rank; nothing is filled up or replicated."""
    whole = load_target(SMOLLM2, dtype=torch.float32, device=CPU)
    spec = head_spec(whole)
    case = Case(Path(SMOLLM2), whole, spec, random_head_tensors(spec))
    texts = [[1, 504, 3575, 282, 4649, 314], [1, 788, 314, 260, 1389, 282, 1343, 47]]
    requests = [
        Request(f"r{i}", tuple(ids), SamplingParams(max_tokens=12, ignore_eos=True))
        for i, ids in enumerate(texts)
    ]

    def run(engine: Engine, _: Any) -> Any:
        (rows,) = engine.forward_hidden(texts[:1])
        return engine.generate(requests), engine.score(texts), rows.hidden_TD

    settings = {} if schedule == "mtp" else {"schedule": schedule, "tree_nodes": 6}
    alone = run(make_engine(case, whole, draft=True, **settings), None)
    plain = make_engine(case, whole, draft=False).generate(requests)
    generations, scores, hidden = lead(case, 3, run, draft=True, **settings)
    assert generations == alone[0]
    assert [one.output_ids for one in generations] == [one.output_ids for one in plain]
    for got, want in zip(scores, alone[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert relative_error(hidden, alone[2]) < 1e-4

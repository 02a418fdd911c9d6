"""Each rung must turn red for the faults it exists for, and stay green for a correct pair."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.ids import hash_token_ids
from mtp_train.features.manifest import Fingerprint
from mtp_train.features.reader import FeatureReader
from mtp_train.features.shards import FeatureSample
from mtp_train.features.sources import HuggingFaceSource, RuntimeSource
from mtp_train.features.writer import FeatureWriter, finish_store, recover_store
from mtp_train.validate import p0, p1, p2, p3, p4, rejection
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject
from runtime import verify
from runtime.batch import ForwardBatch, build_batch
from runtime.head_spec import EAGLE_FIELDS, DraftVocab, hash_vocab_ids, save_head
from runtime.linear import PlainLinear
from runtime.models.heads import build_head
from runtime.models.heads.mtp import MtpHead
from runtime.models.llama import LlamaModel
from runtime.ops import BlockOps, NormWeight
from runtime.request import HiddenRows
from runtime.sampling import Stream
from runtime.spec import base, draw, mtp
from runtime.spec.mtp import MtpSchedule
from tests.unit.runtime.engine_fixtures import (
    EAGLE3,
    VOCAB,
    head_spec,
    random_head_tensors,
    tiny_target,
)
from tests.unit.runtime.test_spec import MUTANTS as SCHEDULE_MUTANTS
from tests.unit.validate.subjects import RUNTIME, make_prompts, make_subject

SEQUENCES = make_prompts((40, 9, 61, 23))
PROMPTS = make_prompts()
SMALL_P4 = p4.P4Sizes(max_tokens=24, state_requests=3, state_tokens=12, triples=4000)
K = 2
DRAFT_IDS = torch.tensor([0, 2, 3, 4, 6, 7, 9, 10])

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("subject"))


def climb_p0(subject: Subject, **options: Any) -> RungResult:
    return p0.check(subject, SEQUENCES, max_logprob_gap=1e-4, max_kl=0.01, **options)


def climb_p3(subject: Subject) -> RungResult:
    return p3.check(subject, PROMPTS, k=K, max_tokens=30, min_drafts=100)


# -- the correct pair ------------------------------------------------------------------------------


def test_clean_pair_is_green(subject: Subject) -> None:
    results = [
        climb_p0(subject),
        p1.check(subject, SEQUENCES),
        p2.check(subject, SEQUENCES, k=3),
        climb_p3(subject),
        p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4),
    ]
    assert {result.name: result.passed for result in results} == dict.fromkeys(
        ("P0", "P1", "P2", "P3", "P4"), True
    )
    assert results[3].figures["float32_steps"] > 80
    assert results[4].figures["draft_states_checked"] > 20


def test_clean_pair_is_green_in_bfloat16(tmp_path: Path) -> None:
    subject = make_subject(tmp_path, dtype=torch.bfloat16)
    assert climb_p0(subject).passed
    assert p1.check(subject, SEQUENCES).passed
    assert p2.check(subject, SEQUENCES, k=1).passed


@pytest.mark.parametrize("recycle", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("concat", ["embedding_hidden", "hidden_embedding"])
def test_every_kind_of_head_is_green(tmp_path: Path, recycle: str, concat: str) -> None:
    subject = make_subject(tmp_path, recycle=recycle, concat=concat, first_embedding_mask=False)
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed


# -- P0: the state that is stored ------------------------------------------------------------------


class OneLayerOff(RuntimeSource):
    """States of the layer before the last, normed like the last."""

    def __init__(self, model: LlamaModel, **options: Any) -> None:
        shorter = copy.copy(model)
        shorter.blocks = model.blocks[:-1]
        super().__init__(shorter, **options)


class _SkipFinalNorm(BlockOps):
    def __init__(self, ops: BlockOps, norm: NormWeight) -> None:
        self.ops, self.norm = ops, norm

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Any) -> torch.Tensor:
        if norm is self.norm:
            return x if delta is None else x + delta
        return self.ops.add_rms_norm(x, delta, norm)

    def norm_heads(self, heads_NXC: torch.Tensor, norm: NormWeight) -> None:
        self.ops.norm_heads(heads_NXC, norm)

    def rotate(self, *args: Any) -> None:
        self.ops.rotate(*args)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.ops.silu_mul(gate_up)


class PreNorm(RuntimeSource):
    """States before the final norm where they belong after it."""

    def __init__(self, model: LlamaModel, **options: Any) -> None:
        unnormed = copy.copy(model)
        unnormed.ops = _SkipFinalNorm(model.ops, model.final_norm)
        super().__init__(unnormed, **options)


class ShiftedHidden(RuntimeSource):
    """Row i holds the state of row i - 1."""

    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        for rows in super().hidden(sequences):
            yield replace(rows, hidden_TD=rows.hidden_TD.roll(1, 0))


class LostRow(RuntimeSource):
    """A row that a prefix cache swallowed."""

    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        for rows in super().hidden(sequences):
            yield HiddenRows(rows.key, rows.token_ids[1:], rows.hidden_TD[1:])


@pytest.mark.parametrize("source", [OneLayerOff, PreNorm, ShiftedHidden, LostRow])
def test_p0_sees_wrong_states(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, source: type[RuntimeSource]
) -> None:
    monkeypatch.setattr(p0, "RuntimeSource", source)
    assert not climb_p0(subject).passed


def test_p0_sees_a_head_tied_to_the_embedding_by_mistake(tmp_path: Path) -> None:
    subject = make_subject(tmp_path)
    model = subject.target(torch.float32).model
    model.lm_head = PlainLinear(model.embedding_VD)
    assert not climb_p0(subject).passed


def make_store(path: Path, subject: Subject, source: type[RuntimeSource]) -> FeatureReader:
    """A bf16 store whose states come from ``source``."""
    model = subject.target(torch.float32).model
    fingerprint = Fingerprint("w", "t", "c", hidden_size=model.config.hidden_size, codec="bf16")
    recover_store(path, fingerprint)
    with FeatureWriter(
        path, fingerprint=fingerprint, shard_tokens=64, max_quarantined=0, known=set()
    ) as writer:
        states = source(model, max_batch_tokens=64, max_len=64).hidden(SEQUENCES)
        for rows in sorted(states, key=lambda rows: rows.key):
            ids = torch.tensor(rows.token_ids)
            sample = FeatureSample(
                hash_token_ids(ids.tolist()), ids, torch.ones(len(ids)).bool(), rows.hidden_TD
            )
            writer.add(sample.sample_id, sample.input_ids, sample.loss_mask, sample.hidden)
    finish_store(path)
    return FeatureReader(path)


def test_p0_accepts_a_correct_store_and_its_token_rows(tmp_path: Path, subject: Subject) -> None:
    store = make_store(tmp_path / "train", subject, RuntimeSource)
    rows = {hash_token_ids(ids): ids for ids in SEQUENCES}
    result = climb_p0(subject, stores=[store], token_rows=rows)
    assert result.passed, result.note
    assert result.figures["store_train"]["rows"] == sum(map(len, SEQUENCES))


@pytest.mark.parametrize("source", [OneLayerOff, PreNorm, ShiftedHidden])
def test_p0_sees_wrong_states_in_the_store(
    tmp_path: Path, subject: Subject, source: type[RuntimeSource]
) -> None:
    store = make_store(tmp_path / "train", subject, source)
    assert not climb_p0(subject, stores=[store]).passed


@pytest.mark.parametrize("cut", [2, -1], ids=["rows_missing", "rows_too_many"])
def test_p0_sees_a_store_that_is_not_the_token_sets(
    tmp_path: Path, subject: Subject, cut: int
) -> None:
    store = make_store(tmp_path / "train", subject, RuntimeSource)
    rows = {hash_token_ids(ids): [*ids, 1, 1] if cut > 0 else ids[:cut] for ids in SEQUENCES}
    assert not climb_p0(subject, stores=[store], token_rows=rows).passed


# -- P1: batch composition -------------------------------------------------------------------------


def chunk_positions_restart(*args: Any, **options: Any) -> ForwardBatch:
    """Stale positions: every chunk of a prompt begins at position 0."""
    batch = build_batch(*args, **options)
    starts = torch.cat(
        [
            torch.full((count,), start)
            for start, count in zip(options["starts"], options["q_lens"], strict=True)
        ]
    )
    return replace(batch, positions_N=batch.positions_N - starts)


def neighbours_share_a_row(*args: Any, **options: Any) -> ForwardBatch:
    """The second request of a batch reads the keys of the first."""
    rows = list(options["table_rows"])
    batch = build_batch(*args, **options)
    return batch if len(rows) < 2 else replace(batch, table_rows=(rows[0], rows[0], *rows[2:]))


@pytest.mark.parametrize("mutant", [chunk_positions_restart, neighbours_share_a_row])
def test_p1_sees_features_that_depend_on_the_batch(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., ForwardBatch]
) -> None:
    monkeypatch.setattr(base, "build_batch", mutant)
    assert not p1.check(subject, SEQUENCES).passed


# -- P2: training against inference ----------------------------------------------------------------


@dataclass
class MisreadSubject(Subject):
    """The runtime builds its head from something else than what was trained."""

    change: Callable[[MtpHead], None] | None = None
    overrides: tuple[tuple[str, Any], ...] = ()

    def head(self, dtype: torch.dtype) -> MtpHead:
        spec = replace(self.spec, **dict(self.overrides))
        head = build_head(spec, self.tensors, self.target(dtype).model)
        if self.change is not None:
            self.change(head)
        return head


def wrong_embedding(head: MtpHead) -> None:
    head._target = copy.copy(head._target)
    head._target.embedding_VD = head._target.embedding_VD.roll(1, 0)


def tied_head(head: MtpHead) -> None:
    head.lm_head = PlainLinear(head._target.embedding_VD)


def reads_g(head: MtpHead) -> None:
    """``g`` where the residual stream belongs."""
    forward = head.forward

    def other(batch: ForwardBatch, *args: Any) -> torch.Tensor:
        rows_NE = batch.hidden_ND
        assert rows_NE is not None
        if rows_NE.shape[1] > head.width:
            rows_NE = rows_NE.roll(head.width, 1)
        return forward(replace(batch, hidden_ND=rows_NE), *args)

    head.forward = other  # type: ignore[method-assign]


def hidden_of_the_row_before(head: MtpHead) -> None:
    forward = head.forward

    def shifted(batch: ForwardBatch, *args: Any) -> torch.Tensor:
        assert batch.hidden_ND is not None
        return forward(replace(batch, hidden_ND=batch.hidden_ND.roll(1, 0)), *args)

    head.forward = shifted  # type: ignore[method-assign]


def chained_steps_keep_their_position(head: MtpHead) -> None:
    """Recycled steps sit one position too early (a shift of all positions would not matter)."""
    forward = head.forward

    def stale(batch: ForwardBatch, *args: Any) -> torch.Tensor:
        if len(batch.positions_N) == 1:
            batch = replace(batch, positions_N=batch.positions_N - 1)
        return forward(batch, *args)

    head.forward = stale  # type: ignore[method-assign]


P2_MUTANTS: dict[str, dict[str, Any]] = {
    "concatenation_swapped": {"overrides": (("concat", "hidden_embedding"),)},
    "theta": {"overrides": (("rope", "theta"),)},
    "eps": {"overrides": (("norm_eps", 1e-3),)},
    "recycle_rule": {"overrides": (("recycle", "pre_norm"),)},
    "first_embedding_mask_dropped": {"overrides": (("first_embedding_mask", False),)},
    "stale_position": {"change": chained_steps_keep_their_position},
    "norm_form": {"overrides": (("norm_form", "1+w"),)},
    "wrong_embedding": {"change": wrong_embedding},
    "tied_head": {"change": tied_head},
    "shifted_hidden": {"change": hidden_of_the_row_before},
}


@pytest.mark.parametrize("name", P2_MUTANTS)
def test_p2_sees_a_head_that_is_read_differently(tmp_path: Path, name: str) -> None:
    subject = make_subject(tmp_path, kind=MisreadSubject)
    assert isinstance(subject, MisreadSubject)
    for field_name, value in P2_MUTANTS[name].items():
        setattr(subject, field_name, value)
    if name == "theta":
        subject.overrides = (("rope", replace(subject.spec.rope, theta=5000.0)),)
    assert not p2.check(subject, SEQUENCES, k=3).passed


def test_an_eagle_head_is_green(tmp_path: Path) -> None:
    subject = with_head(tmp_path, kind="eagle", projection_bias=True, **EAGLE_FIELDS)
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed
    subject.overrides = (("kind", "mtp"), ("first_embedding_mask", True))
    assert not p2.check(subject, SEQUENCES, k=3).passed


def test_a_head_of_two_layers_is_green(tmp_path: Path) -> None:
    subject = with_head(tmp_path, num_layers=2)
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed
    subject.overrides = (("recycle", "pre_norm"),)
    assert not p2.check(subject, SEQUENCES, k=3).passed


@pytest.mark.parametrize("draft_vocab", [False, True])
def test_an_eagle3_head_is_green(tmp_path: Path, draft_vocab: bool) -> None:
    subject = with_head(tmp_path, DRAFT_IDS if draft_vocab else None, **EAGLE3)
    assert climb_p0(subject).passed
    assert p1.check(subject, SEQUENCES).passed
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed


EAGLE3_MUTANTS: dict[str, dict[str, Any]] = {
    "residual": {"overrides": (("residual", "normed"),)},
    "recycle_rule": {"overrides": (("recycle", "post_norm"),)},
    "eps": {"overrides": (("norm_eps", 1e-3),)},
    "stale_position": {"change": chained_steps_keep_their_position},
    "wrong_embedding": {"change": wrong_embedding},
    "target's head": {"change": tied_head},
    "shifted_hidden": {"change": hidden_of_the_row_before},
    "stream_of_g": {"change": reads_g},
}


@pytest.mark.parametrize("name", EAGLE3_MUTANTS)
def test_p2_sees_an_eagle3_head_that_is_read_differently(tmp_path: Path, name: str) -> None:
    subject = with_head(tmp_path, None, **EAGLE3)
    for field_name, value in EAGLE3_MUTANTS[name].items():
        setattr(subject, field_name, value)
    assert not p2.check(subject, SEQUENCES, k=3).passed


def test_p0_sees_a_stream_one_layer_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = with_head(tmp_path, None, **EAGLE3)
    hidden_states = HuggingFaceSource.residuals

    def off(source: HuggingFaceSource, ids: Any, layer_ids: Any) -> list[torch.Tensor]:
        return hidden_states(source, ids, [k - 1 if k == 1 else k for k in layer_ids])

    monkeypatch.setattr(HuggingFaceSource, "residuals", off)
    result = climb_p0(subject)
    assert not result.passed
    assert "S_1 differs from huggingface" in result.note


def with_head(
    tmp_path: Path, draft_ids: torch.Tensor | None = None, /, **changes: Any
) -> MisreadSubject:
    """A subject whose head is another than the usual one, drafting from ``draft_ids``."""
    subject = make_subject(tmp_path, kind=MisreadSubject)
    assert isinstance(subject, MisreadSubject)
    more = {}
    if draft_ids is not None:
        size, sha256 = len(draft_ids), hash_vocab_ids(draft_ids)
        changes["draft_vocab"] = DraftVocab(size=size, coverage=0.5, ids_sha256=sha256)
        more["draft_vocab_ids"] = draft_ids
    spec = replace(subject.spec, **changes)
    save_head(tmp_path / "other", spec, random_head_tensors(spec) | more)
    return replace(subject, head_path=tmp_path / "other", _contract=None, _heads={})


def test_p2_needs_chained_steps_to_see_the_recycle_rule(tmp_path: Path) -> None:
    """The first step cannot see it: that is why K steps are compared."""
    subject = make_subject(tmp_path, kind=MisreadSubject)
    assert isinstance(subject, MisreadSubject)
    subject.overrides = (("recycle", "pre_norm"),)
    assert p2.check(subject, SEQUENCES, k=1).passed
    assert not p2.check(subject, SEQUENCES, k=2).passed


# -- P3 and P4: the schedule -----------------------------------------------------------------------


@pytest.mark.parametrize("mutate", SCHEDULE_MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_draft_turns_p3_or_p4_red(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[MtpSchedule], None]
) -> None:
    """P4's recompute sees every one of them although the output is right."""
    original = MtpSchedule.__init__

    def broken(self: MtpSchedule, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        mutate(self)

    monkeypatch.setattr(MtpSchedule, "__init__", broken)
    worst, checked = p4.state_error(subject, PROMPTS[:3], k=K, max_tokens=12)
    assert checked > 0
    assert worst > p4.STATE_BOUND
    outputs = p4.compare_outputs(subject, PROMPTS, k=K, max_tokens=20, temperature=0.0)
    assert outputs.num_different == 0
    assert not climb_p3(subject).passed


def make_reduced(path: Path) -> Subject:
    """A head that drafts from seven of the eleven tokens."""
    target = tiny_target(path / "target")
    ids = torch.tensor([0, 1, 3, 5, 6, 8, 10])
    vocab = DraftVocab(size=len(ids), coverage=0.9, ids_sha256=hash_vocab_ids(ids))
    spec = head_spec(target, draft_vocab=vocab)
    tensors = random_head_tensors(spec) | {"draft_vocab_ids": ids}
    save_head(path / "head", spec, tensors)
    return Subject(path / "target", path / "head", torch.float32, RUNTIME)


def test_a_reduced_draft_vocabulary_is_green(tmp_path: Path) -> None:
    subject = make_reduced(tmp_path)
    assert p2.check(subject, SEQUENCES, k=3).passed
    assert climb_p3(subject).passed


def test_p3_sees_draft_ids_used_as_target_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MtpSchedule, "_to_target_ids", lambda self, ids: ids)
    assert not climb_p3(make_reduced(tmp_path)).passed


def test_p3_sees_a_map_read_as_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offset(self: MtpSchedule, ids: torch.Tensor) -> torch.Tensor:
        assert self.head.draft_vocab_ids is not None
        return (ids + self.head.draft_vocab_ids.take(ids)) % VOCAB

    monkeypatch.setattr(MtpSchedule, "_to_target_ids", offset)
    assert not climb_p3(make_reduced(tmp_path)).passed


def test_p3_fails_without_enough_drafts(tmp_path: Path) -> None:
    subject = make_subject(tmp_path, dtype=torch.bfloat16)
    result = climb_p3(subject)
    assert not result.passed
    assert result.figures["bfloat16_drafts"] == 0
    assert result.figures["float32_steps_that_differ"] == 0


# -- P4: the output --------------------------------------------------------------------------------


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mtp.verify_chain

    def lenient(mode: Any, logits: torch.Tensor, drafts: torch.Tensor, *args: Any, **rest: Any):  # type: ignore[no-untyped-def]
        out = original(mode, logits, drafts, *args, **rest)
        ids = torch.cat([drafts, logits[:, -1].argmax(-1)[:, None]], 1)
        return replace(
            out,
            ids_BK1=ids,
            num_emitted_B=torch.full_like(out.num_emitted_B, ids.shape[1]),
            last_ids_B=ids[:, -1],
        )

    monkeypatch.setattr(mtp, "verify_chain", lenient)


def keyed_by_another_position(monkeypatch: pytest.MonkeyPatch) -> None:
    original = verify.sample

    def late(logits: Any, sampling: Any, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        return original(logits, sampling, positions + 1, stream)

    monkeypatch.setattr(verify, "sample", late)


def argmax_verified_as_if_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "inverse_cdf", lambda weights, uniform: weights.argmax(-1))


def draft_and_accept_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = draw.philox_uniform
    monkeypatch.setattr(
        draw,
        "philox_uniform",
        lambda seed, position, stream: original(seed, position, Stream.ACCEPT),
    )


@pytest.mark.parametrize(
    ("patch", "figure"),
    [
        (accept_everything, "greedy_differences"),
        (keyed_by_another_position, "keyed_differences"),
        (argmax_verified_as_if_sampled, "rejection_sampled_g"),
        (draft_and_accept_share_noise, "rejection_sampled_g"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_p4_sees_changed_output(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, patch: Patch, figure: str
) -> None:
    patch(monkeypatch)
    result = p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4)
    assert not result.passed
    assert result.figures[figure] > result.bounds[figure]


def test_p4_does_not_accept_a_wrong_token_as_a_tie(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_everything(monkeypatch)
    outputs = p4.compare_outputs(subject, PROMPTS, k=K, max_tokens=20, temperature=0.0)
    assert outputs.num_different > 0
    assert all(gap > p4.TIE_GAP for gap in outputs.gaps)


def test_the_joint_test_keeps_its_false_alarm_rate() -> None:
    """Its limit is the 1 - 1e-4 quantile of chi-square: known values of the table."""
    for freedom, quantile in ((10, 35.564), (100, 161.319)):
        limit = rejection.chi_square_limit(freedom)
        assert limit == pytest.approx(quantile, rel=1e-4)

"""`mtp hot-vocab`: lists from the answers, heads that carry them, figures side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.config import DataConfig
from data_prep.token_set import TokenRow, TokenSetWriter, load_token_set
from mtp_train.answer_tokens import count_answer_tokens, covered_share, most_frequent, train_rows
from mtp_train.config import Config, HotVocabConfig, RunConfig, TargetConfig, ValidateConfig
from mtp_train.export import write_export
from mtp_train.export.engines import servable_by
from mtp_train.hot_vocab import stage
from mtp_train.hot_vocab.compare import WHOLE, measure_sizes, time_sizes
from mtp_train.hot_vocab.lists import make_lists, write_heads
from mtp_train.run_dir import read_json
from mtp_train.settings import ConfigError, load_config
from mtp_train.stages import run_hot_vocab, run_validate
from mtp_train.validate import ladder
from mtp_train.validate.prompt_sets import PromptSet
from mtp_train.validate.speed import Timing
from mtp_train.validate.subject import Subject
from runtime.head_spec import load_head, save_head
from tests.unit.foreign.heads import forget_record
from tests.unit.runtime.engine_fixtures import VOCAB
from tests.unit.validate.subjects import RUNTIME, make_prompts, make_subject

# What the assistant wrote; 10 is in prompts only and occurs most.
ANSWERS = ([3, 3, 3, 5, 5, 8], [3, 5, 1, 0], [8, 3, 5, 5])
COUNTS = [1, 1, 0, 5, 0, 5, 0, 0, 2, 0, 0]


def write_token_set(path: Path) -> None:
    for split, answers in (("train", ANSWERS), ("validation", [[2, 2, 2]])):
        writer = TokenSetWriter()
        for index, answer in enumerate(answers):
            ids = (10,) * 9 + tuple(answer)
            mask = (False,) * 9 + (True,) * len(answer)
            writer.append(TokenRow(f"{split}{index}", "test", ids, mask))
        writer.write(path / split)
    fingerprint = {
        "version": 1,
        "fingerprint": "f",
        "inputs": {"tokenizer": "k", "chat_template": "c"},
        "content": {"train": "t", "validation": "v"},
    }
    (path / "fingerprint.json").write_text(json.dumps(fingerprint))


def fake_sets(config: Config, subject: Subject) -> list[PromptSet]:
    return [PromptSet("random", tuple(tuple(p) for p in make_prompts()))]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    make_subject(tmp_path)
    write_token_set(tmp_path / "data")
    monkeypatch.setattr(stage, "load_prompt_sets", fake_sets)
    return Config(
        run=RunConfig("hot", root=str(tmp_path / "runs")),
        target=TargetConfig(str(tmp_path / "target"), dtype="float32", device="cpu"),
        data=DataConfig(path=str(tmp_path / "data")),
        runtime=RUNTIME,
        validate=ValidateConfig(k=2, max_tokens=16, head=str(tmp_path / "head")),
        hot_vocab=HotVocabConfig(sizes=(4, 2), speed_prompts=4, speed_tokens=5, speed_repeats=1),
    )


def subject_of(config: Config, head: Path) -> Subject:
    return Subject(Path(config.target.path), head, torch.float32, RUNTIME)


# -- lists -----------------------------------------------------------------------------------------


def test_only_what_the_assistant_wrote_in_the_train_split_is_counted(tmp_path: Path) -> None:
    write_token_set(tmp_path)
    rows = train_rows(load_token_set(tmp_path))
    counts = count_answer_tokens(rows, vocab_size=VOCAB)
    assert counts.tolist() == COUNTS


def test_lists_hold_the_most_frequent_ids_in_the_vocabularys_order() -> None:
    counts = np.array(COUNTS)
    assert most_frequent(counts, 2).tolist() == [3, 5]
    assert most_frequent(counts, 4).tolist() == [0, 3, 5, 8]  # 0 and 1 tie
    small, large = make_lists(counts, (4, 2))
    assert (small.size, large.size) == (2, 4)
    assert small.coverage == pytest.approx(10 / 14)
    assert large.coverage == pytest.approx(13 / 14)
    assert covered_share(counts, torch.arange(VOCAB)) == 1


@pytest.mark.parametrize("size", [VOCAB, VOCAB + 1])
def test_a_list_of_the_whole_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"hot_vocab\.sizes: {size} must be below .* {VOCAB}"):
        make_lists(np.array(COUNTS), (2, size))


def test_answers_without_a_token_are_refused() -> None:
    with pytest.raises(ValueError, match="no answer token"):
        make_lists(np.zeros(VOCAB, dtype=np.int64), (2,))


def test_heads_differ_in_the_list_alone(config: Config, tmp_path: Path) -> None:
    lists = make_lists(np.array(COUNTS), (2, 4))
    places = write_heads(tmp_path / "head", lists, tmp_path / "lists")
    whole, tensors = load_head(tmp_path / "head")
    spec, reduced = load_head(places[4])
    assert spec.draft_vocab is not None
    assert (spec.draft_vocab.size, spec.draft_vocab.coverage) == (4, pytest.approx(13 / 14))
    assert replace(spec, draft_vocab=None) == whole
    assert reduced.pop("draft_vocab_ids").tolist() == [0, 3, 5, 8]
    assert all(torch.equal(tensors[name], reduced[name]) for name in tensors)
    with pytest.raises(ValueError, match=r"draft_vocab\.size=4"):
        write_heads(places[4], lists, tmp_path / "again")


# -- figures ---------------------------------------------------------------------------------------


def test_every_vocabulary_decodes_the_same_and_accepts_less_with_fewer_ids(
    config: Config, tmp_path: Path
) -> None:
    whole = subject_of(config, tmp_path / "head")
    places = write_heads(tmp_path / "head", make_lists(np.array(COUNTS), (1, 8)), tmp_path / "x")
    subjects = {WHOLE: whole} | {size: whole.with_head(place) for size, place in places.items()}
    measured = measure_sizes(
        subjects,
        make_prompts(),
        draft_lengths=(1, 2),
        max_tokens=20,
        temperature=0.0,
        prompt_set="random",
        seed=0,
    )
    outputs = {
        size: [g.output_ids for g in item.generations] for (size, k), item in measured.items()
    }
    assert outputs[WHOLE] == outputs[1] == outputs[8]
    accepted = {size: measured[size, 1].acceptance.accepted[0] for size in subjects}
    assert accepted[1] < accepted[8] < accepted[WHOLE]
    ids_W = subjects[1].draft_columns()
    assert ids_W is not None
    assert {i for g in measured[1, 2].generations for s in g.steps for i in s.draft_ids} == set(
        ids_W.tolist()
    )


def test_speed_is_over_plain_decoding_and_over_the_whole_vocabulary(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are made up, so that the ratios are known: plain 8, whole 4, list 2."""
    whole = subject_of(config, tmp_path / "head")
    places = write_heads(tmp_path / "head", make_lists(np.array(COUNTS), (4,)), tmp_path / "x")
    subjects = {WHOLE: whole, 4: whole.with_head(places[4])}
    order: list[tuple[str, int]] = []

    def run(self: Any, group: Any, k: int) -> Timing:
        head = self._subject.head_path.name
        order.append((head, k))
        seconds = 8.0 if not k else 4.0 if head == "head" else 2.0
        return Timing(seconds, 10, 20, 0.1, (0.1, 0.2))

    monkeypatch.setattr("mtp_train.hot_vocab.compare.SpeedBench.run", run)
    found = time_sizes(
        subjects,
        make_prompts(),
        draft_lengths=(1, 2),
        max_tokens=6,
        repeats=2,
        prompt_set="random",
    )
    assert set(found) == {(size, k) for size in (WHOLE, 4) for k in (1, 2)}
    for (size, _), (speed, gain) in found.items():
        assert speed.speedup == pytest.approx(4.0 if size else 2.0)
        assert gain.ratio == pytest.approx(2.0 if size else 1.0)
        assert speed.k in (1, 2)
    turns = [order[-5 * (n + 1) : len(order) - 5 * n] for n in range(4)]
    assert all(len(set(turn)) == 5 for turn in turns), "each prompt is decoded by all in turn"
    assert len({turn[0] for turn in turns}) == 4, "the one that begins changes"


# -- the command -----------------------------------------------------------------------------------


def test_the_command_measures_keeps_and_does_it_once(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_hot_vocab(config) == 0
    printed = capsys.readouterr().out
    assert "this runtime only" in printed
    assert "d2t" in printed
    root = tmp_path / "runs" / "hot"
    content = read_json(root / "hot_vocab.json")
    rows = {(row["size"], row["k"]): row for row in content["rows"]}
    assert set(rows) == {(size, k) for size in (0, 2, 4) for k in (1, 2, 3)}
    assert {row["served_by"] for key, row in rows.items() if key[0]} == {"this runtime only"}
    assert rows[0, 1]["served_by"] == "vLLM, SGLang"
    assert rows[4, 2]["coverage"] == pytest.approx(13 / 14)
    assert 0 < rows[2, 1]["emitted_share"] < rows[4, 1]["emitted_share"] < 1
    assert all(row["speed"]["speedup"] > 0 for row in rows.values())
    assert rows[0, 2]["speed_over_whole"]["ratio"] == 1
    for size in (2, 4):
        assert load_head(root / "hot_vocab" / str(size))[0].draft_vocab is not None

    assert run_hot_vocab(config) == 0
    assert "before" in capsys.readouterr().out
    assert read_json(root / "hot_vocab.json") == content
    other = replace(config, hot_vocab=replace(config.hot_vocab, sizes=(3,), speed_prompts=0))
    assert run_hot_vocab(other) == 0
    assert "before" not in capsys.readouterr().out
    rows = read_json(root / "hot_vocab.json")["rows"]
    assert {row["size"] for row in rows} == {0, 3}
    assert all(row["speed"] is None for row in rows)


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_export_is_measured_as_the_head_it_is_of(
    config: Config, tmp_path: Path, is_ours: bool
) -> None:
    out = tmp_path / "out"
    arguments = {"format": "mimo", "target_dir": tmp_path / "target", "unvalidated": True}
    spec, tensors = load_head(tmp_path / "head")
    save_head(tmp_path / "head", replace(spec, concat="hidden_embedding"), tensors)
    write_export(tmp_path / "head", out, **arguments)  # type: ignore[arg-type]
    if not is_ours:
        forget_record(out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    rows = []
    for name, head in (("native", tmp_path / "head"), ("export", out)):
        settings = replace(config.validate, head=str(head))
        speedless = replace(config.hot_vocab, sizes=(4,), speed_prompts=0)
        own = replace(config, validate=settings, hot_vocab=speedless)
        assert run_hot_vocab(replace(own, run=replace(config.run, name=name))) == 0
        rows.append(read_json(tmp_path / "runs" / name / "hot_vocab.json")["rows"])
    for ours, theirs in zip(*rows, strict=True):
        assert ours["tau"] == theirs["tau"]
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_head_with_a_list_climbs_the_ladder_and_says_who_can_serve_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = write_heads(tmp_path / "head", make_lists(np.array(COUNTS), (4,)), tmp_path / "hot")
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    validate = replace(
        config.validate, head=str(places[4]), rungs=("P2", "P3"), max_tokens=20, min_drafts=10
    )
    data = replace(config.data, path="")  # a head from elsewhere: nothing stored to compare
    assert run_validate(replace(config, validate=validate, data=data)) == 0
    parity = read_json(places[4] / "parity.json")
    assert parity["draft_vocab"]["size"] == 4
    assert parity["draft_vocab"]["served_by"] == "this runtime only"
    readme = (places[4] / "README.md").read_text()
    assert "Drafts from 4 of these ids, 92.86%" in readme
    assert "d2t" in readme
    report = (tmp_path / "runs" / "hot" / "report.html").read_text()
    assert "drafts from 4 ids only" in report


def test_servable_follows_the_contract(config: Config, tmp_path: Path) -> None:
    spec, _ = load_head(tmp_path / "head")
    assert servable_by(spec).engines == ("vLLM", "SGLang")
    unusual = servable_by(replace(spec, recycle="pre_norm"))
    assert unusual.engines == ()
    assert "recycle" in unusual.why


@pytest.mark.parametrize("sizes", [[], [0], [4096, -1]])
def test_sizes_that_are_none_are_refused_before_anything_is_loaded(sizes: list[int]) -> None:
    raw = {"run": {"name": "x"}, "target": {"path": "y"}, "data": {"sources": ["z"]}}
    with pytest.raises(ConfigError, match=r"hot_vocab\.sizes="):
        load_config(raw | {"hot_vocab": {"sizes": sizes}})

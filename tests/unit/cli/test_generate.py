"""`mtp generate`: the prompt arrives unharmed, the answer is the runtime's, the figures are its."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mtp_train import cli
from mtp_train.config import Config
from mtp_train.export import write_export
from mtp_train.generate import run_generate, take_prompt
from mtp_train.generation import Answer, TimedRun, decode_timed, open_answering
from mtp_train.generation_report import describe, to_json, token_origins
from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.settings import load_config
from mtp_train.token_colours import TokenPrinter, style_of
from runtime.head_spec import EAGLE_FIELDS, save_head
from runtime.models.llama import LlamaModel
from runtime.models.loader import load_target
from runtime.request import Request, SamplingParams, SpecStep, TokenEvent
from runtime.spec.draft_target import DraftTargetSchedule
from tests.unit.cli.byte_target import byte_tokenizer, save_byte_target
from tests.unit.foreign.heads import forget_record
from tests.unit.runtime.engine_fixtures import (
    StubDraft,
    head_spec,
    make_engine,
    random_head_tensors,
    tiny_target,
)
from tests.unit.runtime.model_fixtures import save_llama

END_OF_TURN = 2
NASTY = "run.name=x ${oc.env:HOME} 'single' \"double\"\nnew line, [list], {a: b} \\ – ünï"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a random head of it, the latter where run ``tiny`` has its head."""
    path = tmp_path_factory.mktemp("place")
    save_byte_target(path / "target")
    target = load_target(
        path / "target",
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dir=path / "cache",
    )
    spec = head_spec(target)
    save_head(path / "runs" / "tiny" / "head", spec, random_head_tensors(spec))
    return path


def make_config(place: Path, *, name: str = "tiny", **generate: Any) -> Config:
    return load_config(
        {
            "run": {"name": name, "root": str(place / "runs")},
            "target": {
                "path": str(place / "target"),
                "dtype": "float32",
                "device": "cpu",
                "cache_dir": str(place / "cache"),
            },
            "data": {},
            "runtime": {"num_threads": 1},
            "generate": {"max_tokens": 24} | generate,
        }
    )


def run_cli(
    monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: str, name: str = "tiny"
) -> int | str | None:
    settings = [
        f"run.name={name}",
        f"run.root={place / 'runs'}",
        f"target.path={place / 'target'}",
        f"target.cache_dir={place / 'cache'}",
        "target.dtype=float32",
        "target.device=cpu",
        "runtime.num_threads=1",
        "generate.max_tokens=6",
    ]
    monkeypatch.setattr(sys, "argv", ["mtp", "generate", *arguments, *settings])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("source", ["argument", "standard input"])
def test_a_prompt_with_any_characters_reaches_the_model(
    source: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(NASTY + "\n"))
    given = NASTY if source == "argument" else "-"
    assert run_cli(monkeypatch, place, given, "json=true", "raw=true") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prompt"] == NASTY
    assert printed["prompt_tokens"] == len(NASTY.encode())


def test_the_draft_length_is_what_was_measured_unless_one_is_asked_for(place: Path) -> None:
    assert open_answering(make_config(place), "Hi").k == 3  # validate.k: nothing was measured
    rows = [{"batch_size": 1, "k": k, "speedup": 1 / k} for k in (2, 4)]
    file = place / "runs" / "tiny" / "head" / "parity.json"
    write_json_atomic(file, {"speed": rows})
    try:
        assert open_answering(make_config(place), "Hi").k == 2
        assert open_answering(make_config(place, k=4), "Hi").k == 4
        assert open_answering(make_config(place, draft_layers=[0]), "Hi").k == 3
    finally:
        file.unlink()


def test_a_head_that_others_wrote_drafts_and_is_read_once(place: Path, tmp_path: Path) -> None:
    target = load_target(
        place / "target",
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dir=place / "cache",
    )
    spec = head_spec(target, kind="eagle", **EAGLE_FIELDS)
    save_head(tmp_path / "head", spec, random_head_tensors(spec))
    out = tmp_path / "eagle"
    write_export(
        tmp_path / "head", out, format="eagle", target_dir=place / "target", unvalidated=True
    )
    config = make_config(tmp_path, name="foreign", head=str(out), k=2)
    config = replace(config, target=make_config(place).target)
    ours = open_answering(config, "Hi").answer(lambda event: None)
    forget_record(out)
    theirs = open_answering(config, "Hi").answer(lambda event: None)
    assert theirs.run.steps == ours.run.steps
    assert any(step.draft_ids for step in theirs.run.steps)
    (imported,) = (tmp_path / "runs" / "foreign" / "imported").iterdir()
    assert read_json(imported / "import.json")["format"] == "eagle"


def test_the_chat_template_is_applied_as_a_server_does(place: Path) -> None:
    answering = open_answering(make_config(place), "Hi")
    want = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answering.tokenizer.decode(answering.prompt_ids, skip_special_tokens=False) == want


def test_standard_output_holds_the_answer_and_nothing_else(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, place, "Hi", "json=true") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert run_cli(monkeypatch, place, "Hi") == 0
    printed = capsys.readouterr()
    assert printed.out.removesuffix("\n") == text.removesuffix("\n")
    assert "tokens/s" in printed.err
    assert "τ" in printed.err
    assert sorted(p.name for p in (place / "runs").rglob("*") if p.is_file()) == [
        "config.json",
        "model.safetensors",
    ]


def test_without_a_head_the_text_is_plain_and_the_hint_says_how_to_get_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, place, "Hi", name="other") == 0
    printed = capsys.readouterr()
    assert "mtp train run.name=other" in printed.err
    assert "τ" not in printed.err
    assert run_cli(monkeypatch, place, "Hi") == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "/no/such/head"}, r"head=/no/such/head: config\.json is missing"),
        ({"max_tokens": 5000}, r"generate\.max_tokens=5000: with 21 prompt tokens and K=3"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_name(
    settings: dict[str, Any], message: str, place: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        open_answering(make_config(place, **settings), "Hi")


@pytest.fixture(scope="module")
def draft_models(place: Path) -> Path:
    """Beside the target: a model with its tokens, one with two of them exchanged, one padded."""
    tokenizer = byte_tokenizer()
    save_llama(place / "good", seed=4, vocab_size=len(tokenizer), num_hidden_layers=1)
    save_llama(place / "padded", seed=4, vocab_size=len(tokenizer) + 5)
    for name in ("good", "padded"):
        tokenizer.save_pretrained(place / name)
    shutil.copytree(place / "good", place / "exchanged")
    file = place / "exchanged" / "tokenizer.json"
    values = json.loads(file.read_text())
    vocab = values["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(values))
    return place


@pytest.mark.parametrize("draft", [{"draft_model": "good"}, {"draft_layers": [1]}])
def test_a_draft_model_drafts_instead_of_a_head(draft: dict[str, Any], draft_models: Path) -> None:
    """Whether there is a head or not, which the run ``tiny`` has."""
    if "draft_model" in draft:
        draft = {"draft_model": str(draft_models / "good")}
    for name in ("tiny", "without-a-head"):
        answering = open_answering(make_config(draft_models, name=name, k=2, **draft), "Hi")
        assert answering.draft_engine is not None
        assert isinstance(answering.draft_engine.schedule, DraftTargetSchedule)
        answer = answering.answer(lambda event: None)
        assert answer.acceptance is not None
        assert answer.acceptance.num_drafts > 0
        assert answer.first_difference is None
        assert not answering.hint


def test_the_targets_own_layers_are_not_loaded_again(draft_models: Path) -> None:
    both = {"draft_model": str(draft_models / "target"), "draft_layers": [0]}
    answering = open_answering(make_config(draft_models, **both), "Hi")
    engine = answering.draft_engine
    assert engine is not None
    assert isinstance(engine.schedule, DraftTargetSchedule)
    draft = engine.schedule.draft.model
    assert isinstance(draft, LlamaModel)
    assert isinstance(engine.target, LlamaModel)
    assert draft.blocks == engine.target.blocks[:1]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"draft_model": "exchanged"}, r"exchanged: 2 of \d+ token ids .* \('b' there, 'a' in"),
        ({"draft_model": "padded"}, r"padded: its vocab_size is \d+, the target's .* the padding"),
        ({"draft_model": "nowhere"}, r"generate\.draft_model=.*nowhere: .*no such directory"),
        ({"draft_layers": [1, 7]}, r"generate\.draft_layers=\[1, 7\]: .* of 0\.\.1"),
    ],
)
def test_a_draft_model_that_cannot_draft_is_refused_by_name(
    draft: dict[str, Any], message: str, draft_models: Path
) -> None:
    if "draft_model" in draft:
        draft = {"draft_model": str(draft_models / draft["draft_model"])}
    with pytest.raises(ValueError, match=message):
        open_answering(make_config(draft_models, **draft), "Hi")


@pytest.mark.parametrize(
    ("prompt", "message"), [(" \n", "the prompt is empty"), ("a\udcff", "not valid UTF-8")]
)
def test_a_prompt_that_is_none_is_refused(prompt: str, message: str, place: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_generate(make_config(place), prompt)


@pytest.mark.parametrize(
    "arguments", [[], ["run.name=mine"], ["experiment=demo", "Why?"], ["--fast"]]
)
def test_a_setting_in_place_of_the_prompt_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        take_prompt(run_generate, arguments)
    assert ended.value.code == 2
    assert "prompt" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["- a list item", "x=1", "seed=3 or not?", "--"])
def test_whatever_else_comes_first_is_the_prompt(prompt: str) -> None:
    assert take_prompt(run_generate, [prompt, "k=2"])[1] == ["k=2"]


def test_options_alone_are_left_to_hydra() -> None:
    assert take_prompt(run_generate, ["--help"])[1] == ["--help"]


def test_figures_are_those_of_the_engine(place: Path) -> None:
    answering = open_answering(make_config(place, k=2), "Hi")
    answer = answering.answer(lambda event: None)
    assert answering.draft_engine is not None
    sampling = SamplingParams(max_tokens=24)
    (want,) = answering.draft_engine.generate([Request("x", answering.prompt_ids, sampling)])
    assert answer.run.output_ids == want.output_ids
    assert answer.run.steps == want.steps
    assert answer.acceptance is not None
    assert answering.k == answer.acceptance.k == 2
    assert answer.acceptance.num_drafts == len(want.steps) > 0
    assert answer.plain is not None
    assert answer.plain.output_ids == want.output_ids
    assert answer.first_difference is None
    assert not answer.interrupted
    assert "; the same tokens" in describe(answer, answering)


def test_a_measured_draft_length_changes_the_steps_and_not_the_text(place: Path) -> None:
    config = make_config(place, k=3, max_tokens=60)
    pinned = open_answering(config, "Hi").answer(lambda event: None)
    measured = replace(config, runtime=replace(config.runtime, draft_length="measured"))
    answering = open_answering(measured, "Hi")
    answer = answering.answer(lambda event: None)
    assert answer.run.output_ids == pinned.run.output_ids
    lengths = Counter(len(step.draft_ids) for step in answer.run.steps)
    emitted = sum(step.num_accepted + 1 for step in answer.run.steps)
    lengths[0] = len(answer.run.output_ids) - 1 - emitted  # the first comes from prefill
    assert set(lengths) <= {0, 1, 3}
    assert lengths[3] < len(pinned.run.steps)
    text = describe(answer, answering)
    for k in (k for k in lengths if lengths[k]):
        assert f"K={k} in {lengths[k]} steps" in text
    assert "chosen" not in describe(pinned, open_answering(config, "Hi"))


def test_the_plain_run_has_as_many_tokens_even_where_it_would_have_ended(place: Path) -> None:
    config = make_config(place, temperature=1.5, max_tokens=150)
    config = replace(config, runtime=replace(config.runtime, verify="rejection"))
    for number in range(20):
        answering = open_answering(config, f"Hi {number}")
        answer = answering.answer(lambda event: None)
        assert answer.plain is not None
        assert len(answer.plain.output_ids) == len(answer.run.output_ids)
        if END_OF_TURN in answer.plain.output_ids[:-1]:
            break
    else:
        pytest.fail("no plain answer would have ended earlier")
    assert "rejection sampling draws anew" in describe(answer, answering)


def test_ctrl_c_ends_between_two_steps_with_the_figures_so_far(place: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    answering = open_answering(make_config(place, max_tokens=200), "Hi")
    seen: list[TokenEvent] = []

    def on_event(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    answer = answering.answer(on_event)
    assert answer.interrupted
    assert answer.plain is None
    assert answer.run.finish_reason == "abort"
    assert list(answer.run.output_ids) == [token for event in seen for token in event.token_ids]
    assert len(seen) == 3
    assert "stopped" in describe(answer, answering)
    assert signal.getsignal(signal.SIGINT) is before
    engine = answering.draft_engine
    assert engine is not None
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_a_second_ctrl_c_does_not_wait_for_the_step(place: Path) -> None:
    answering = open_answering(make_config(place), "Hi")

    def on_event(event: TokenEvent) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            answering.answer(on_event)
    finally:
        signal.signal(signal.SIGINT, before)


def test_times_are_the_engines_and_origins_are_positions_in_the_draft(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    request = Request("prompt", (1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True))
    (plain,) = make_engine(target).generate([request])
    whole = [*request.prompt_ids, *plain.output_ids]
    draft = StubDraft(target, {"prompt": whole}, lambda position: position % 4 != 0)
    draft.engine = make_engine(target, draft, num_draft_tokens=3)
    run = decode_timed(draft.engine, request.prompt_ids, request.sampling, lambda event: None)
    assert run.output_ids == plain.output_ids
    assert run.first_token_s > 0
    assert run.tokens_per_s == pytest.approx(29 / run.decode_s)
    origins = token_origins(run)
    assert origins[0] == 0
    assert set(origins) == {0, 1, 2, 3}
    assert sum(origin > 0 for origin in origins) == sum(step.num_accepted for step in run.steps)


@pytest.mark.parametrize("tree", ["fixed", "dynamic"])
def test_a_tree_answers_as_the_chain_does(place: Path, tree: str) -> None:
    config = make_config(place)
    chain = open_answering(config, "Hi").answer(lambda event: None)
    runtime = replace(config.runtime, schedule=f"{tree}_tree")
    answering = open_answering(replace(config, runtime=runtime), "Hi")
    answer = answering.answer(lambda event: None)
    assert answer.run.output_ids == chain.run.output_ids
    assert answer.acceptance is not None
    assert answer.acceptance.num_drafts == len(answer.run.steps) > 0
    assert {len(step.draft_ids) for step in answer.run.steps} == {16}
    assert f"{tree} tree of 16 up to K=3 deep" in describe(answer, answering)
    assert json.loads(to_json(answer, answering))["schedule"] == f"{tree}_tree"


def test_the_json_object_tells_each_token_apart(place: Path) -> None:
    answering = open_answering(make_config(place), "Hi")
    ids = tuple(byte_tokenizer()("aé!")["input_ids"])
    run = TimedRun(ids, "length", (SpecStep((ids[1], ids[2], 9), 2, 1),), 0.5, 2.0)
    values = json.loads(to_json(Answer(run, None, None, False), answering))
    assert values["text"] == "aé!"
    assert [(token["text"], token["by"], token.get("position")) for token in values["tokens"]] == [
        ("a", "target", None),
        ("", "draft", 1),
        ("é", "draft", 2),
        ("!", "target", None),
    ]
    assert values["tokens_per_s"] == 1.5
    assert values["speedup"] is None


def stream_to(console: Console, text: str, num_accepted: int) -> None:
    tokenizer = byte_tokenizer()
    printer = TokenPrinter(console, lambda ids: str(tokenizer.decode(list(ids))))
    printer.print_legend(console, 2)
    ids = tuple(tokenizer(text)["input_ids"])
    printer.write(TokenEvent("x", ids, num_accepted, None))
    printer.finish()


def test_accepted_tokens_are_coloured_by_position_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", _environ={})
    stream_to(console, "abc", 2)
    legend, answer, _ = out.getvalue().split("\n")
    assert answer == "\x1b[32ma\x1b[0m\x1b[36mb\x1b[0mc"
    assert "\x1b[32m1st\x1b[0m \x1b[36m2nd\x1b[0m" in legend
    assert style_of(99) == style_of(6) != ""


@pytest.mark.parametrize("terminal", [True, False])
def test_without_colours_there_is_the_text_alone(terminal: bool) -> None:
    out = io.StringIO()
    stream_to(Console(file=out, force_terminal=terminal, no_color=True, _environ={}), "a\nbé[b]", 3)
    assert out.getvalue() == "a\nbé[b]\n"


def test_a_terminal_does_not_obey_escape_sequences_of_the_model() -> None:
    out = io.StringIO()
    stream_to(Console(file=out, force_terminal=True, no_color=True, _environ={}), "\x1b[2Jx\n", 0)
    assert out.getvalue() == "\N{REPLACEMENT CHARACTER}[2Jx\n"
    piped = io.StringIO()
    stream_to(Console(file=piped, force_terminal=False, _environ={}), "\x1b[2Jx\n", 0)
    assert piped.getvalue() == "\x1b[2Jx\n"

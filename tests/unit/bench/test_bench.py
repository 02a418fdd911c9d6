"""Benches of small servers with known pauses and counters, and how they fail."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.bench.command import run_bench, take_lists
from mtp_train.bench.contestants import Live, find_contestants, make_load, read_head_layout
from mtp_train.bench.facts import Contestant, Question
from mtp_train.bench.load import Load, find_out, measure
from mtp_train.bench.prompts import load_questions
from mtp_train.bench.run import run_rounds
from mtp_train.config import BenchConfig, Config, RunConfig, ServingConfig, TargetConfig
from mtp_train.rules import check_config
from mtp_train.serving.engine import open_engine, served_lengths
from mtp_train.serving.job import DraftCounts, ServingError, vllm_layout
from mtp_train.serving.launch import ServerPlan, takes_speculative_option
from tests.serving.streaming_server import StreamManner, serve_stream

QUESTIONS = tuple(Question(str(i), (("user", f"question {i}"),)) for i in range(4))
LOAD = Load(QUESTIONS, max_tokens=8, warm_up_tokens=0, timeout_s=20.0)
SLACK_S = 2.0  # a busy machine may be late, never early


def run_cell(url: str, load: Load = LOAD, *, concurrency: int = 1, model: str = "tiny") -> Any:
    return measure(url, load, model=model, contestant="it", concurrency=concurrency, round_=0)


def make_config(tmp_path: Path, **settings: Any) -> Config:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\nthree\n")
    known = {"prompts": (str(prompts),), "concurrency": (1, 2), "rounds": 2, "warm_up_tokens": 0}
    base = Config(RunConfig("bench", root=str(tmp_path)), TargetConfig(""), data=_data())
    return replace(base, bench=BenchConfig(**(known | settings)))


def _data() -> Any:
    from data_prep.config import DataConfig

    return DataConfig(sources=("a.jsonl",))


def recorded(tmp_path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((tmp_path / "bench" / "bench.json").read_text())
    return value


def test_pauses_counters_and_rates_are_the_servers() -> None:
    manner = StreamManner(k=2, accepted=(2, 0, 1), first_s=0.06, gap_s=0.03)
    with serve_stream(manner) as server:
        facts = find_out(server.url, LOAD)
        assert (facts.model, facts.version, facts.k) == ("tiny", "9.9", 2)
        run_cell(server.url)  # what was counted before is not this cell's
        cell = run_cell(server.url)
    assert cell.counts == DraftCounts(12, (8, 4))
    assert cell.num_tokens == 4 * 7
    assert cell.num_failed == 0
    for answer in cell.answers:
        assert len(answer.arrivals) == 4
        assert 0.06 <= answer.ttft < 0.06 + SLACK_S
        assert all(0.02 <= gap < SLACK_S for gap in answer.gaps)
        assert answer.per_token == pytest.approx(sum(answer.gaps) / 6)
    assert 4 * 0.15 <= cell.wall_s < 4 * 0.15 + SLACK_S
    assert cell.tokens_per_s == pytest.approx(28 / cell.wall_s)


def test_as_many_requests_as_asked_for_are_in_flight() -> None:
    with serve_stream(StreamManner(first_s=0.1)) as server:
        cell = run_cell(server.url, concurrency=3)
    assert server.most_open == 3
    assert [answer.question for answer in cell.answers] == [0, 1, 2, 3, 0, 1]


def test_warm_up_is_neither_timed_nor_counted() -> None:
    with serve_stream(StreamManner(k=1, accepted=(1,))) as server:
        cell = run_cell(server.url, replace(LOAD, warm_up_tokens=2), concurrency=2)
    assert [body["max_tokens"] for body in server.asked] == [2, 2, 8, 8, 8, 8]
    assert cell.counts == DraftCounts(4, (4,))
    assert all(body["temperature"] == 0 for body in server.asked)


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        (StreamManner(has_metrics=False), "/metrics: HTTP 404"),
        (StreamManner(), "it does not speculate"),
        (StreamManner(k=1, counts_double=True), "somebody else is served"),
    ],
)
def test_what_is_not_counted_has_a_reason(manner: StreamManner, reason: str) -> None:
    with serve_stream(manner) as server:
        cell = run_cell(server.url)
    assert cell.counts is None
    assert reason in cell.no_counts


def test_without_usage_chunks_are_counted() -> None:
    with serve_stream(StreamManner(has_usage=False, accepted=(0, 0))) as server:
        assert run_cell(server.url).num_tokens == 4 * 3


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with serve_stream(StreamManner(breaks_off=True)) as server:
        cell = run_cell(server.url)
    assert cell.num_failed == 4
    assert cell.num_tokens == 0
    assert "no request was answered" in cell.error


def test_one_refused_question_is_one_failed_request() -> None:
    with serve_stream(StreamManner(refuses="question 2")) as server:
        cell = run_cell(server.url)
    assert (cell.num_failed, cell.error) == (1, "")
    assert "HTTP 400: too long" in cell.answers[2].error


def test_the_key_is_sent_and_not_shown() -> None:
    with serve_stream(StreamManner(api_key="sesame")) as server:
        assert run_cell(server.url, replace(LOAD, api_key="sesame")).num_failed == 0
        wrong = run_cell(server.url, replace(LOAD, api_key="open"))
    assert "HTTP 401: bad key Bearer ***" in wrong.answers[0].error


@pytest.mark.parametrize(
    ("models", "asked", "words"),
    [
        (("a", "b"), "", "serves a, b; say which one"),
        (("a",), "c", "bench.model=c: .* serves a"),
        ((), "", "serves nothing"),
    ],
)
def test_a_model_that_is_not_served_is_named(
    models: tuple[str, ...], asked: str, words: str
) -> None:
    with (
        serve_stream(StreamManner(models=models)) as server,
        pytest.raises(ServingError, match=words),
    ):
        find_out(server.url, replace(LOAD, model=asked))


def test_nobody_at_the_address_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"url=http://127.0.0.1:9/v1: .*ConnectError"):
        run_bench(make_config(tmp_path, url=("http://127.0.0.1:9/v1",)))


def test_plain_decoding_that_drafts_is_refused(tmp_path: Path) -> None:
    with serve_stream(StreamManner(k=2)) as server:
        config = make_config(tmp_path, url=(server.url,), heads=("none",))
        with pytest.raises(ValueError, match="it drafts K=2"):
            run_bench(config)


def test_the_key_of_a_served_engine_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    with serve_stream(StreamManner(k=2, api_key="sesame")) as server:
        engine = ServingConfig(kind="vllm", url=server.url, api_key_env="MY_KEY")
        config = replace(make_config(tmp_path), engine=engine)
        assert served_lengths(config) == (2,)
        open_engine(config)
        with pytest.raises(ServingError, match="HTTP 401"):
            open_engine(replace(config, engine=replace(engine, api_key_env="")))


def test_a_bench_of_two_servers_is_recorded_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = StreamManner(accepted=(0,) * 5, gap_s=0.05)
    fast = StreamManner(k=2, accepted=(2, 2), gap_s=0.005, first_s=0.0)
    fast.accepted = (2, 1)  # 6 tokens, as the slow one
    with serve_stream(slow) as plain, serve_stream(fast) as head:
        config = make_config(
            tmp_path,
            url=(plain.url, head.url),
            heads=("none", "mine"),
            svg=str(tmp_path / "bench.svg"),
        )
        assert run_bench(config) == 0
    found = recorded(tmp_path)
    assert found["finished"]
    assert [column["winner"] for column in found["columns"]] == ["mine K=2", "mine K=2"]
    by_name = {(cell["contestant"], cell["concurrency"]): cell for cell in found["cells"]}
    assert by_name["mine K=2", 2]["tau"] == 2.5
    assert by_name["mine K=2", 2]["acceptance"] == [1.0, 0.5]
    assert by_name["mine K=2", 1]["equal_texts"] == 1.0
    assert by_name["mine K=2", 1]["speed_up"]["value"] > 1
    assert found["schedules"][0]["ranges"] == [[1, 2, 2]]
    assert found["speculative_config"]["mine"]["num_speculative_tokens_per_batch_size"] == [
        [1, 2, 2]
    ]
    printed = capsys.readouterr().out
    assert "tokens/s, and times plain decoding" in printed
    assert "at no measured load was plain decoding faster" in printed
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")


def test_other_texts_are_found_and_excluded(tmp_path: Path) -> None:
    with (
        serve_stream(StreamManner(gap_s=0.02)) as plain,
        serve_stream(StreamManner(k=1, word="x")) as head,
    ):
        config = make_config(tmp_path, url=(plain.url, head.url), heads=("none", "mine"))
        assert run_bench(config) == 0
    found = recorded(tmp_path)
    assert {column["winner"] for column in found["columns"]} == {"none"}
    assert "0% of its texts" in found["cells"][2]["excluded"]


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    with (
        serve_stream(StreamManner()) as plain,
        serve_stream(StreamManner(k=1, accepted=(0, 0, 0), dies_after=3)) as head,
    ):
        config = make_config(tmp_path, url=(plain.url, head.url), heads=("none", "mine"))
        assert run_bench(config) == 1
    found = recorded(tmp_path)
    assert "no request was answered" in found["failed"]["mine K=1"]
    of_head = [run for run in found["runs"] if run["contestant"] == "mine K=1"]
    assert [run["failed"] for run in of_head] == [0, 4]
    assert len([run for run in found["runs"] if run["contestant"] == "none"]) == 4
    assert {column["winner"] for column in found["columns"] if column["concurrency"] == 2} == {
        "none"
    }


def test_rounds_are_interleaved_and_saved_one_by_one() -> None:
    opened: list[str] = []

    @contextmanager
    def open_(contestant: Contestant) -> Iterator[Live]:
        opened.append(contestant.name)
        if contestant.head == "broken":
            raise ServingError("load", "it said no")
        yield Live(server.url, "tiny", "9.9")

    contestants = [Contestant("none", 0), Contestant("a", 1), Contestant("broken", 1)]
    with serve_stream(StreamManner()) as server:
        for keep_alive in (True, False):
            opened.clear()
            journal = run_rounds(
                contestants,
                LOAD,
                concurrency=(1, 2),
                rounds=2,
                keep_alive=keep_alive,
                open_=open_,
            )
            order = [(run.contestant, run.concurrency, run.round) for run in journal.runs]
            assert journal.failed == {"broken K=1": "load: it said no"}
            if keep_alive:
                assert order[:4] == [
                    ("none", 1, 0),
                    ("a K=1", 1, 0),
                    ("none", 2, 0),
                    ("a K=1", 2, 0),
                ]
                assert order[4:6] == [("a K=1", 1, 1), ("none", 1, 1)]
                assert opened == ["none", "a K=1", "broken K=1"]
            else:
                assert order[:3] == [("none", 1, 0), ("none", 2, 0), ("a K=1", 1, 0)]
                assert opened == ["none", "a K=1", "broken K=1", "a K=1", "none"]


def test_prompts_are_read_from_files(tmp_path: Path) -> None:
    talks = tmp_path / "talks.jsonl"
    lines = [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    talks.write_text("\n".join(map(json.dumps, lines)))
    assert [q.messages for q in load_questions([str(talks)], limit=0)] == [
        (("user", "hello"),),
        (("user", "a"),),
    ]
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    with pytest.raises(ValueError, match="no prompt in there"):
        load_questions([str(empty)], limit=4)
    with pytest.raises(ValueError, match="neither a file nor one of"):
        load_questions(["mtbunch"], limit=4)
    talks.write_text('{"prompts": 3}')
    with pytest.raises(ValueError, match=r"talks.jsonl:1: expected"):
        load_questions([str(talks)], limit=4)


def test_a_native_head_has_to_be_exported_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kind": "mtp"}')
    config = make_config(tmp_path, heads=("none", str(tmp_path)))
    config = replace(config, engine=replace(config.engine, python="/usr/bin/python3"))
    with pytest.raises(ValueError, match="run `mtp export`"):
        find_contestants(config, make_load(config))


@pytest.mark.parametrize(
    ("raw", "method"),
    [
        ({"architectures": ["MiMoMTPModel"]}, "mtp"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
    ],
)
def test_a_directory_of_others_is_told_by_its_config(
    tmp_path: Path, raw: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_head_layout(tmp_path).method == method


def test_lists_are_typed_with_commas() -> None:
    _, words = take_lists(
        lambda config: 0, ["heads=none,runs/a=1/mimo", "k=1,3", "bench.url=http://a/v1", "seed=1,2"]
    )
    assert words == [
        "heads=[none,'runs/a=1/mimo']",
        "k=[1,3]",
        "bench.url=['http://a/v1']",
        "seed=1,2",
    ]


def test_the_command_line_of_a_server(tmp_path: Path) -> None:
    plan = ServerPlan(
        python=Path("python"),
        target=tmp_path,
        dtype="float32",
        k=3,
        head=tmp_path / "mimo",
        layout=vllm_layout("mimo"),
        args={"max_model_len": 512, "enforce_eager": True},
    )
    words = plan.command(80)
    after = dict(itertools.pairwise(words))
    assert json.loads(after["--speculative-config"]) == {
        "method": "mtp",
        "model": str(tmp_path / "mimo"),
        "num_speculative_tokens": 3,
    }
    assert after["--max-model-len"] == "512"
    assert {"--no-enable-prefix-caching", "--enforce-eager"} <= set(words)
    assert "--speculative-config" not in replace(plan, k=0).command(80)


def test_an_option_is_looked_up_in_the_installed_engine(tmp_path: Path) -> None:
    config = tmp_path / "vllm" / "config"
    config.mkdir(parents=True)
    (config.parent / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    (config / "speculative.py").write_text("class SpeculativeConfig:\n    its_option: int = 1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert takes_speculative_option(python, "its_option")
    assert not takes_speculative_option(python, "another")
    assert not takes_speculative_option(tmp_path / "nowhere", "its_option")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": ("localhost",)}, "bench.url='localhost': expected an address"),
        ({"url": ("http://a", "http://b"), "heads": ("x",)}, "name what each server serves"),
        ({"k": (0,)}, r"bench.k=\[0\]: name numbers from 1"),
        ({"concurrency": ()}, r"bench.concurrency=\[\]: name numbers"),
        ({"concurrency": (4, 4)}, "each may be named once"),
        ({"prompts": ()}, r"bench.prompts=\[\]"),
        ({"min_equal": 1.5}, "bench.min_equal=1.5: must be a share"),
        ({"rounds": 0}, "bench.rounds=0: must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_config(make_config(tmp_path, **settings))


def test_nothing_to_measure_is_said(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    load = make_load(config)
    with pytest.raises(ValueError, match=r"neither bench.url nor engine.python"):
        find_contestants(config, load)
    config = replace(config, engine=ServingConfig(python="python3"))
    with pytest.raises(ValueError, match=r"bench.heads=\[\]: name none and exported"):
        find_contestants(config, load)

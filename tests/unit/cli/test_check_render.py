"""`mtp data check-render`: servers that render as we do pass; each that does not is named."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from data_prep.chat import ChatFormat
from data_prep.config import DataConfig
from data_prep.conversation import Message
from data_prep.endpoints.rendering import ServedRendering, ServedTemplate
from data_prep.openai_format import to_openai, tools_to_openai
from data_prep.render_check import compare, prompts_to_check
from mtp_train.check_render import run_check_render
from mtp_train.config import Config
from mtp_train.features.target import load_tokenizer
from tests.serving.openai_server import Manner, serve, text_answers
from tests.unit.cli.byte_target import TEMPLATE
from tests.unit.cli.test_stages import make_config, target  # noqa: F401 (a fixture)
from tests.unit.data_prep.helpers import CHATML, npm_tokenizer, tiny_tokenizer

OTHER = TEMPLATE.replace("<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}: ")
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
MESSAGES = [
    [{"role": "user", "content": "one question"}],
    [{"role": "system", "content": "short"}, {"role": "user", "content": "and with a system"}],
    [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ],
]


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Config:  # noqa: F811
    source = tmp_path / "talks.jsonl"
    source.write_text("".join(json.dumps({"messages": item}) + "\n" for item in MESSAGES))
    made = make_config(tmp_path, target, sources=[str(source)], regenerate={})
    return replace(made, check_render=replace(made.check_render, rows=8))


def check(config: Config, manner: Manner) -> int:
    tokenizer = load_tokenizer(config.target, Path(config.target.path))
    with serve(text_answers(tokenizer, lambda *_: "hm"), tokenizer, manner=manner) as server:
        settings = replace(config.check_render, url=server.url)
        return run_check_render(replace(config, check_render=settings))


def recorded(config: Config) -> dict[str, Any]:
    file = Path(config.run.root) / config.run.name / "render_check.json"
    value: dict[str, Any] = json.loads(file.read_text())
    return value


@pytest.mark.parametrize(
    ("manner", "way"),
    [
        (Manner(), "/tokenize"),
        (Manner(tokenizes_messages=False), "/v1/chat/completions, prompt_token_ids"),
    ],
)
def test_a_server_that_renders_the_same_passes(
    config: Config, manner: Manner, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config, manner) == 0
    printed = capsys.readouterr().out
    assert "all 3 prompts have the same token ids there as here" in printed
    found = recorded(config)
    assert (found["way"], found["different"], found["model"]) == (way, 0, "tiny")
    assert found["kinds"] == {"one question": 1, "system": 1, "several turns": 1}


@pytest.mark.parametrize("by_tokenize", [True, False])
@pytest.mark.parametrize(
    ("manner", "cause", "words"),
    [
        (Manner(prefix_ids=(1,)), "first token twice", r"'<\|im_start\|>' in front twice"),
        (Manner(prefix_ids=(2,)), "first token added", r"puts '<\|im_end\|>' in front"),
        (
            Manner(generation_prompt=False),
            "no generation prompt",
            r"leaves out the generation prompt '<\|im_start\|>assistant\\n'",
        ),
        (Manner(template=OTHER), "another chat template", r"is '\\none.* here and ': one"),
        (
            Manner(template=TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}"),
            "more after the generation prompt",
            "goes on with '<think>'",
        ),
        (Manner(template=SYSTEM + TEMPLATE), "another chat template", "Be kind"),
    ],
)
def test_a_server_that_renders_otherwise_is_caught_and_named(
    config: Config,
    manner: Manner,
    by_tokenize: bool,
    cause: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(config, replace(manner, tokenizes_messages=by_tokenize)) == 1
    printed = capsys.readouterr().out
    assert f"{cause}: " in printed
    assert re.search(words, printed)
    assert "DIFFER" in printed
    assert re.search(r"^  [-+] +\d+  '", printed, flags=re.M), "a diff of tokens"
    found = recorded(config)
    assert cause in found["causes"]
    assert "one question" not in json.dumps(found["causes"])
    assert "second" not in json.dumps(found)


def test_names_and_ids_of_any_kind_are_shown(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are no markup, and an id that the tokenizer has not is still a difference."""
    source = Path(config.data.sources[0])
    named = [{"id": f"[/b]{i}", "messages": item} for i, item in enumerate(MESSAGES)]
    source.write_text("".join(json.dumps(item) + "\n" for item in named))
    assert check(config, Manner(prefix_ids=(100_000,))) == 1
    assert "[/b]0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "is_known"),
    [
        ({"choices": [None]}, False),
        ({"choices": 5, "usage": []}, False),
        ({"choices": [], "prompt_token_ids": [-1]}, False),
        ({"prompt_token_ids": [2**40]}, False),
        ({"usage": {"prompt_tokens": "5"}}, False),
        ({"choices": [{"prompt_token_ids": [5]}]}, True),
        ({"prompt_token_ids": [5]}, True),
    ],
)
def test_a_strange_reply_says_nothing(reply: dict[str, Any], is_known: bool) -> None:
    class Strange:
        url = "http://a"

        async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return reply

    template = ServedTemplate(cast(Any, Strange()), model="m", kwargs={})
    asked = template.render([Message("user", "hm")], [])
    if is_known:
        assert asyncio.run(asked) == ServedRendering(1, (5,))
        return
    with pytest.raises(ValueError, match="says nothing about its prompts"):
        asyncio.run(asked)


def test_a_template_that_must_be_asked_for_an_answer_is_compared(tmp_path: Path) -> None:
    stern = "{% if not add_generation_prompt and messages | length == 1 %}"
    stern += "{{ raise_exception('ask me') }}{% endif %}"
    source = tmp_path / "one.jsonl"
    source.write_text(json.dumps({"prompt": "the answer"}) + "\n")
    chat = ChatFormat(tiny_tokenizer(stern + CHATML))
    (prompt,) = prompts_to_check(DataConfig(sources=(str(source),)), chat, limit=1)
    theirs = (*prompt.ids[:3], 7, *prompt.ids[3:])
    difference = compare(prompt, ServedRendering(len(theirs), theirs), chat)
    assert difference is not None
    assert difference.cause == "another chat template"


def test_equal_counts_are_not_sold_as_equal_prompts(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Manner(tokenizes_messages=False, gives_ids=False, takes_extensions=False)
    assert check(config, plain) == 0
    printed = capsys.readouterr().out
    assert "equal counts do not prove equal prompts" in " ".join(printed.split())
    assert check(config, replace(plain, prefix_ids=(1,))) == 1
    assert "another number of tokens" in capsys.readouterr().out


def test_a_server_that_says_nothing_is_refused(config: Config) -> None:
    silent = Manner(tokenizes_messages=False, gives_ids=False, has_usage=False)
    with pytest.raises(ValueError, match="says nothing about its prompts"):
        check(config, silent)
    with pytest.raises(ValueError, match=r"check_render\.model to one of .*: a, b"):
        check(config, Manner(models=("a", "b")))
    with pytest.raises(ValueError, match=r"check_render\.url is empty"):
        run_check_render(config)
    gone = replace(config.check_render, url="http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match=r"check_render\.url=http://127\.0\.0\.1:9/v1: "):
        run_check_render(replace(config, check_render=gone))


def tokenised(mutate: Callable[..., tuple[int, ...]], source: Path) -> str:
    chat = ChatFormat(tiny_tokenizer())
    (prompt,) = prompts_to_check(DataConfig(sources=(str(source),)), chat, limit=1)
    theirs = mutate(prompt.ids)
    difference = compare(prompt, ServedRendering(len(theirs), theirs), chat)
    return difference.cause if difference else ""


def test_every_change_of_a_prompt_is_a_difference(tmp_path: Path) -> None:
    source = tmp_path / "one.jsonl"
    source.write_text(json.dumps({"prompt": "the answer"}) + "\n")
    tokenizer = tiny_tokenizer(CHATML)
    letters = tokenizer("t", add_special_tokens=False)["input_ids"]

    def spelled(ids: tuple[int, ...]) -> tuple[int, ...]:
        (the,) = [i for i, token in enumerate(ids) if tokenizer.decode([token]) == "the"]
        parts = [tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "the"]
        return (*ids[:the], *parts, *ids[the + 1 :])

    assert tokenised(lambda ids: ids, source) == ""
    assert tokenised(lambda ids: ids[1:], source) == "first token missing"
    assert tokenised(lambda ids: ids[:-1], source) == "end missing"
    assert tokenised(spelled, source) == "other tokens for the same text"
    for index in range(6):
        assert tokenised(lambda ids, at=index: (*ids[:at], *letters, *ids[at:]), source)


def test_prompts_are_of_every_kind_that_the_sources_hold(tmp_path: Path) -> None:
    qwen3 = npm_tokenizer("qwen3")
    source = tmp_path / "talks.jsonl"
    call = {"id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with_tool = {
        "tools": [tool],
        "messages": [
            {"role": "user", "content": "How warm?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "21"},
            {"role": "assistant", "content": "It is 21."},
        ],
    }
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, with_tool]))
    chat = ChatFormat(qwen3)
    prompts = prompts_to_check(DataConfig(sources=(str(source),)), chat, limit=4)
    kinds = [prompt.kind for prompt in prompts]
    assert kinds.count("one question") == 3
    assert kinds.count("tools, tool results") == 1
    for prompt in prompts:
        served = qwen3.apply_chat_template(
            to_openai(prompt.messages),
            tools=tools_to_openai(prompt.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert served == prompt.text

"""Rows against the tokenizer's own ``apply_chat_template``, for four families of templates.

The reference is what a server does: for every answer, ``apply_chat_template`` of everything before
it with the generation prompt, and a hand-written text of what the model then generates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from data_prep.chat import ChatFormat, UnrenderableError, load_chat_format
from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Message, ToolCall
from data_prep.rows import ConversationRows, recorded_rows
from data_prep.statistics import mask_spans
from data_prep.token_set import TokenRow
from tests.unit.data_prep.helpers import npm_tokenizer, prompt_ids, talk, tiny_tokenizer

END = {
    "smollm2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
FAMILIES = list(END)
APPEND_ONLY = ["smollm2", "llama3_1", "deepseek_v3"]
NO_THOUGHTS = {"qwen3": {"enable_thinking": False}}

# Same calls as Llama 3.1: one per message, "parameters", results in the role ipython.
LLAMA_TOOLS = """
{{- bos_token }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- for t in tools %}{{- t | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at once') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
TOOL = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'


@pytest.fixture
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, request.getfixturevalue(request.param)


def rows_of(chat: ChatFormat, conversation: Conversation) -> ConversationRows:
    (result,) = recorded_rows([conversation], chat, DataConfig(min_tokens=1))
    return result


def generated(chat: ChatFormat, row: TokenRow) -> list[str]:
    return [chat.decode(row.input_ids[a:b]) for a, b in mask_spans(row.loss_mask)]


def raw(message: Message, arguments: type = dict) -> dict[str, Any]:
    """A message as an OpenAI client sends it."""
    import json

    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        value["reasoning_content"] = message.reasoning
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.loads(call.arguments)
                    if arguments is dict
                    else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        value["tool_call_id"] = message.tool_call_id
    return value


def served_prompt(
    tokenizer: Any, conversation: Conversation, turn: int, **kwargs: Any
) -> tuple[int, ...]:
    """Prompt ids of the answer at message ``turn``, by the public call that servers use."""
    import json

    ids = tokenizer.apply_chat_template(
        [raw(message) for message in conversation.messages[:turn]],
        tools=[json.loads(tool) for tool in conversation.tools] or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **kwargs,
    )
    return tuple(ids)


def answer_turns(conversation: Conversation) -> list[int]:
    return [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]


ODD_TEXTS = [
    "plain",
    "  indented\n\tcode  \n\n",
    "\n\nstarts with lines",
    "emoji 👩‍👩‍👧 and العربية and 日本語のテキスト",
    "nbsp\u00a0and\u200bzero width",
    "1234567890 + x_y == {'a': [1]}",
]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_a_row_is_the_served_prompt_and_the_answer(family: tuple[str, Any], text: str) -> None:
    name, tokenizer = family
    kwargs = NO_THOUGHTS.get(name, {})
    chat = ChatFormat(tokenizer, kwargs=kwargs)
    conversation = talk(text, text)
    result = rows_of(chat, conversation)
    assert result.rejects == ()
    (row,) = result.rows
    assert prompt_ids(row) == served_prompt(tokenizer, conversation, 1, **kwargs)
    # What a template trims off was never part of the message it shows to the model.
    shown = text.strip() if name == "llama3_1" else text
    shown = shown.lstrip("\n") if name == "qwen3" else shown
    assert generated(chat, row) == [shown + END[name]]
    assert row.loss_mask == tuple(i >= len(prompt_ids(row)) for i in range(len(row.input_ids)))


@pytest.mark.parametrize("family", APPEND_ONLY, indirect=True)
def test_turns_of_an_append_only_template_share_a_row(family: tuple[str, Any]) -> None:
    name, tokenizer = family
    chat = ChatFormat(tokenizer)
    talked = talk("one?", "first", "two?", "second", "three?", "third", "four?")
    conversation = talked.with_messages((Message("system", "Be brief."), *talked.messages))
    (row,) = rows_of(chat, conversation).rows
    assert generated(chat, row) == [text + END[name] for text in ("first", "second", "third")]
    starts = [start for start, _ in mask_spans(row.loss_mask)]
    for start, turn in zip(starts, answer_turns(conversation), strict=True):
        assert row.input_ids[:start] == served_prompt(tokenizer, conversation, turn)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_qwen_drops_earlier_thoughts_so_each_answer_has_its_own_row(
    qwen3: Any, thinking: bool | None
) -> None:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    chat = ChatFormat(qwen3, kwargs=kwargs)
    conversation = Conversation(
        (
            Message("user", "one?"),
            Message("assistant", "first", reasoning="hmm one"),
            Message("user", "two?"),
            Message("assistant", "second", reasoning="hmm two"),
        )
    )
    result = rows_of(chat, conversation)
    if thinking is False:  # the prompt closes the thought before the model speaks
        assert result.rows == ()
        assert {reject.reason for reject in result.rejects} == {"prompt_not_a_prefix"}
        return
    first, second = result.rows
    assert generated(chat, first) == ["<think>\nhmm one\n</think>\n\nfirst<|im_end|>"]
    assert generated(chat, second) == ["<think>\nhmm two\n</think>\n\nsecond<|im_end|>"]
    assert "hmm one" not in chat.decode(second.input_ids)
    for row, turn in ((first, 1), (second, 3)):
        assert prompt_ids(row) == served_prompt(qwen3, conversation, turn, **kwargs)


def test_an_empty_thought_that_the_template_injects_is_not_the_assistants(qwen3: Any) -> None:
    chat = ChatFormat(qwen3)
    conversation = talk("one?", "first", "two?", "second")
    first, second = rows_of(chat, conversation).rows
    assert generated(chat, first) == ["first<|im_end|>"]
    assert generated(chat, second) == ["second<|im_end|>"]
    for row, turn in ((first, 1), (second, 3)):
        served = served_prompt(qwen3, conversation, turn, enable_thinking=False)
        assert prompt_ids(row) == served


def test_an_empty_thought_that_was_recorded_is_the_assistants(qwen3: Any) -> None:
    chat = ChatFormat(qwen3)
    text = "<think>\n\n</think>\n\nfirst"
    (row,) = rows_of(chat, talk("one?", text)).rows
    assert generated(chat, row) == [text + "<|im_end|>"]


@pytest.mark.parametrize("family", APPEND_ONLY, indirect=True)
def test_thoughts_a_template_cannot_show_are_rejected(family: tuple[str, Any]) -> None:
    chat = ChatFormat(family[1])
    message = Message("assistant", "answer", reasoning="a thought")
    result = rows_of(chat, Conversation((Message("user", "q"), message)))
    assert result.rows == ()
    assert [reject.reason for reject in result.rejects] == ["template_drops_thoughts"]


OPENED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_thought_opened_by_the_prompt_is_completed() -> None:
    chat = ChatFormat(tiny_tokenizer(OPENED))
    messages = (
        Message("user", "one?"),
        Message("assistant", "first", reasoning="hm"),
        Message("user", "two?"),
        Message("assistant", "second"),
    )
    result = rows_of(chat, Conversation(messages))
    (row,) = result.rows
    assert generated(chat, row) == ["hm\n</think>\n\nfirst<|im_end|>"]
    assert chat.decode(prompt_ids(row)).endswith("<|im_start|>assistant\n<think>\n")
    assert [reject.reason for reject in result.rejects] == ["no_thoughts"]


def tool_talk(*calls: ToolCall, reasoning: str = "") -> Conversation:
    results = tuple(
        Message("tool", f"result {i}", tool_call_id=call.call_id) for i, call in enumerate(calls)
    )
    return Conversation(
        (
            Message("user", "How warm is it?"),
            Message("assistant", tool_calls=calls, reasoning=reasoning),
            *results,
            Message("assistant", "Warm.", reasoning=reasoning and "done"),
        ),
        tools=(TOOL,),
    )


ROME = ToolCall("weather", '{"city": "Rome", "days": 2}', "call00000")
PARIS = ToolCall("weather", '{"city": "Paré"}', "call00001")


def test_qwen_tool_calls_are_under_the_mask(qwen3: Any) -> None:
    chat = ChatFormat(qwen3)
    conversation = tool_talk(ROME, PARIS)
    called, answered = rows_of(chat, conversation).rows
    assert generated(chat, called) == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paré"}}\n</tool_call><|im_end|>'
    ]
    assert generated(chat, answered) == ["Warm.<|im_end|>"]
    text = chat.decode(prompt_ids(answered))
    assert '"name": "weather"' in text.split("<|im_end|>")[0]  # the definition
    assert "<tool_response>\nresult 0\n</tool_response>" in text
    served = served_prompt(qwen3, conversation, 1, enable_thinking=False)
    assert prompt_ids(called) == served


def test_qwen_keeps_thoughts_between_calls_so_they_share_a_row(qwen3: Any) -> None:
    chat = ChatFormat(qwen3)
    conversation = tool_talk(ROME, reasoning="need data")
    (row,) = rows_of(chat, conversation).rows
    assert generated(chat, row) == [
        "<think>\nneed data\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call><|im_end|>',
        "<think>\ndone\n</think>\n\nWarm.<|im_end|>",
    ]
    starts = [start for start, _ in mask_spans(row.loss_mask)]
    for start, turn in zip(starts, (1, 3), strict=True):
        assert row.input_ids[:start] == served_prompt(qwen3, conversation, turn)


def test_llama_tool_calls_with_a_named_template(llama3_1: Any, tmp_path: Any) -> None:
    path = tmp_path / "tools.jinja"
    path.write_text(LLAMA_TOOLS)
    chat = load_chat_format(llama3_1, template_path=str(path), kwargs=())
    conversation = tool_talk(ROME)
    (row,) = rows_of(chat, conversation).rows
    assert generated(chat, row) == [
        '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eot_id|>',
        "Warm.<|eot_id|>",
    ]
    starts = [start for start, _ in mask_spans(row.loss_mask)]
    for start, turn in zip(starts, (1, 3), strict=True):
        served = served_prompt(llama3_1, conversation, turn, chat_template=LLAMA_TOOLS)
        assert row.input_ids[:start] == served
    parallel = rows_of(chat, tool_talk(ROME, PARIS))
    assert parallel.rows == ()
    assert {reject.reason for reject in parallel.rejects} == {"template_error"}


@pytest.mark.parametrize("family", ["smollm2", "llama3_1"], indirect=True)
def test_a_template_that_drops_tool_calls_is_noticed(family: tuple[str, Any]) -> None:
    chat = ChatFormat(family[1])
    result = rows_of(chat, tool_talk(ROME))
    assert result.rows == ()
    assert {reject.reason for reject in result.rejects} == {"template_drops_tool_calls"}
    assert not chat.renders_tools


def test_deepseek_parallel_calls_pass_and_a_single_one_never_ends(deepseek_v3: Any) -> None:
    chat = ChatFormat(deepseek_v3)
    result = rows_of(chat, tool_talk(ROME, PARIS))
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
    texts = [text for row in result.rows for text in generated(chat, row)]
    assert texts == [
        "<｜tool▁calls▁begin｜>"
        + call.replace("{}", ROME.arguments)
        + "\n"
        + call.replace("{}", PARIS.arguments)
        + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "Warm.<｜end▁of▁sentence｜>",
    ]
    # The template closes the list of calls only after the second one.
    single = rows_of(chat, tool_talk(ROME))
    assert [reject.reason for reject in single.rejects] == ["no_end_of_turn"]
    assert [text for row in single.rows for text in generated(chat, row)] == [texts[1]]


def test_deepseek_drops_calls_that_come_with_text(deepseek_v3: Any) -> None:
    conversation = tool_talk(ROME, PARIS)
    user, call, *rest = conversation.messages
    spoken = replace(call, content="Let me look.")
    result = rows_of(ChatFormat(deepseek_v3), conversation.with_messages((user, spoken, *rest)))
    assert [reject.reason for reject in result.rejects] == ["template_drops_tool_calls"]


def test_arguments_are_given_as_an_object_where_the_template_takes_one() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}="
        "{{ c.function.arguments if c.function.arguments is string "
        "else c.function.arguments | tojson(indent=1) }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (row,) = rows_of(ChatFormat(tiny_tokenizer(template)), tool_talk(PARIS)).rows
    chat = ChatFormat(tiny_tokenizer())
    assert generated(chat, row)[0] == 'weather={\n "city": "Paré"\n}<|im_end|>'


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"], indirect=True)
def test_calls_are_read_back_from_generated_text(family: tuple[str, Any]) -> None:
    chat = ChatFormat(family[1])
    text = chat.turn_text(tool_talk(ROME, PARIS), 1).answer
    assert chat.call_syntax is not None
    head, calls = chat.call_syntax.parse("Let me look. " + text)
    assert head.startswith("Let me look.")
    assert [(call.name, call.arguments) for call in calls] == [
        (call.name, call.arguments) for call in (ROME, PARIS)
    ]
    assert chat.call_syntax.parse("no call") == ("no call", ())


def test_a_broken_call_is_text(qwen3: Any) -> None:
    syntax = ChatFormat(qwen3).call_syntax
    assert syntax is not None
    text = '<tool_call>\n{"name": "f", "arguments": {"x": \n</tool_call>'
    assert syntax.parse(text) == (text, ())


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_an_answer_that_spells_the_end_of_turn_is_rejected(family: tuple[str, Any]) -> None:
    name, tokenizer = family
    chat = ChatFormat(tokenizer)
    result = rows_of(chat, talk("q", f"begin{END[name]}rest"))
    assert result.rows == ()
    assert [reject.reason for reject in result.rejects] == ["end_of_turn_inside"]


def test_text_the_tokenizer_normalises_is_rejected(qwen3: Any) -> None:
    chat = ChatFormat(qwen3, kwargs={"enable_thinking": False})
    result = rows_of(chat, talk("q", "cafe\u0301"))  # the tokenizer composes the accent
    assert [reject.reason for reject in result.rejects] == ["not_reversible"]


def test_a_template_that_changes_the_answer_is_noticed() -> None:
    template = tiny_tokenizer().chat_template.replace("m['content']", "m['content'] | upper")
    result = rows_of(ChatFormat(tiny_tokenizer(template)), talk("q", "answer"))
    assert [reject.reason for reject in result.rejects] == ["template_changes_answer"]


def test_template_arguments_are_values_not_text(qwen3: Any) -> None:
    chat = load_chat_format(qwen3, template_path="", kwargs=(("enable_thinking", "false"),))
    text = chat.prompt_text((Message("user", "q"),), ())
    assert text.endswith("<think>\n\n</think>\n\n")


def test_the_template_hash_covers_template_and_arguments(tiny: Any) -> None:
    hashes = {
        ChatFormat(tiny).template_hash,
        ChatFormat(tiny, template=tiny.chat_template + " ").template_hash,
        ChatFormat(tiny, kwargs={"x": 1}).template_hash,
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template of its own"),
        ("{{ raise_exception('no') }}", "fails on a plain question"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "would never stop"),
        ("{% for m in messages %}{{ m['role'] }}\n{% endfor %}", "does not render the answer"),
    ],
)
def test_an_unusable_template_is_refused_at_once(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatFormat(tiny_tokenizer(template))


def test_no_row_is_made_of_a_turn_that_cannot_be_rendered(tiny: Any) -> None:
    chat = ChatFormat(
        tiny, template=tiny.chat_template + "{{ raise_exception('x') if messages|length > 2 }}"
    )
    result = rows_of(chat, talk("q", "a", "r", "b"))
    assert [generated(chat, row) for row in result.rows] == [["a<|im_end|>"]]
    assert [reject.reason for reject in result.rejects] == ["template_error"]
    with pytest.raises(UnrenderableError):
        chat.turn_text(talk("q", "a", "r", "b"), 3)


def test_a_missing_tokenizer_skips_and_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MTP_REQUIRE_TOKENIZERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="absent"):
        npm_tokenizer("no-such-family")
    monkeypatch.setenv("MTP_REQUIRE_TOKENIZERS", "1")
    with pytest.raises(pytest.fail.Exception, match="absent"):
        npm_tokenizer("no-such-family")

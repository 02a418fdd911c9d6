from __future__ import annotations

import random

import pytest

from data_prep.conversation import Conversation, Message, Reject, ToolCall
from data_prep.normalise import Normalised, assign_split, normalise
from tests.unit.data_prep.helpers import talk


def run(*records: Conversation, max_turns: int = 0, max_conversations: int = 0) -> Normalised:
    return normalise(records, max_turns=max_turns, max_conversations=max_conversations)


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages]


def reasons(result: Normalised) -> list[str]:
    return [reject.reason for reject in result.rejects]


def part(record_id: str, first: int, last: int) -> Conversation:
    """Messages ``first`` … ``last - 1`` of one long talk."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], f"m{i}") for i in range(first, last))
    return Conversation(messages, record_id=record_id)


def test_parts_numbered_by_position_are_merged_without_their_overlap() -> None:
    result = run(part("x_7", 7, 10), part("x_0", 0, 4), part("x_3", 3, 8))
    assert [contents(item) for item in result.conversations] == [[f"m{i}" for i in range(10)]]
    assert result.rejects == ()


def test_parts_numbered_in_sequence_are_merged_in_order() -> None:
    result = run(part("x_2", 6, 8), part("x_1", 4, 6), part("x_0", 0, 4))
    assert [contents(item) for item in result.conversations] == [[f"m{i}" for i in range(8)]]


def test_parts_after_a_gap_are_rejected() -> None:
    result = run(part("x_0", 0, 4), part("x_9", 9, 12))
    assert [contents(item) for item in result.conversations] == [["m0", "m1", "m2", "m3"]]
    assert reasons(result) == ["missing_split"]


def test_a_part_without_the_beginning_is_rejected() -> None:
    result = run(part("x_3", 3, 6))
    assert result.conversations == ()
    assert reasons(result) == ["missing_split"]


def test_parts_of_different_sources_are_not_merged() -> None:
    first = Conversation(part("x_0", 0, 2).messages, source="a", record_id="x_0")
    second = Conversation(part("x_2", 2, 4).messages, source="b", record_id="x_2")
    assert len(run(first, second).conversations) == 2


def test_numbered_names_that_are_no_parts_stay_apart() -> None:
    result = run(talk("q1", "a1", record_id="task_7"), talk("q2", "a2", record_id="task_9"))
    assert len(result.conversations) == 2


def test_equal_conversations_are_kept_once() -> None:
    result = run(talk("q", "a", record_id="1"), talk("q", "a", record_id="2"), talk("q", "b"))
    assert len(result.conversations) == 2
    assert reasons(result) == ["duplicate"]


def test_conversations_equal_after_the_turn_limit_are_duplicates() -> None:
    result = run(talk("q", "a", "r", "b"), talk("q", "a", "s", "c"), max_turns=1)
    assert [contents(item) for item in result.conversations] == [["q", "a"]]
    assert reasons(result) == ["duplicate"]


@pytest.mark.parametrize(
    ("messages", "kept", "reason"),
    [
        ("q a <blank> b", "q a", "empty_turn"),
        ("q <blank> r b", "q", "empty_turn"),
    ],
)
def test_a_conversation_ends_before_an_empty_turn(messages: str, kept: str, reason: str) -> None:
    texts = [" \n" if text == "<blank>" else text for text in messages.split()]
    result = run(talk(*texts))
    assert [contents(item) for item in result.conversations] == [kept.split()]
    assert reasons(result) == [reason]


def test_nothing_to_answer_is_rejected() -> None:
    opens = Conversation((Message("assistant", "hello"), Message("user", "q")), record_id="1")
    system = Conversation((Message("system", "rules"),), record_id="2")
    result = run(opens, system)
    assert result.conversations == ()
    assert reasons(result) == ["starts_with_answer", "no_prompt"]


def test_a_second_answer_in_a_row_ends_the_conversation() -> None:
    item = Conversation(
        (Message("user", "q"), Message("assistant", "a"), Message("assistant", "b"))
    )
    result = run(item)
    assert contents(result.conversations[0]) == ["q", "a"]
    assert reasons(result) == ["repeated_answer"]


def test_a_tool_result_needs_a_call() -> None:
    call = Message("assistant", tool_calls=(ToolCall("f", "{}"),))
    result = Message("tool", "r")
    good = Conversation((Message("user", "q"), call, result, result))
    bad = Conversation((Message("user", "q"), Message("assistant", "a"), result))
    assert reasons(run(good)) == []
    assert reasons(run(bad)) == ["orphan_tool_result"]


def test_unanswered_prompts_count_as_turns() -> None:
    item = Conversation((Message("system", "s"), Message("user", "p"), Message("user", "q")))
    assert contents(run(item, max_turns=1).conversations[0]) == ["s", "p"]
    assert contents(run(item, max_turns=2).conversations[0]) == ["s", "p", "q"]


def test_the_order_of_reading_does_not_matter() -> None:
    items = [talk(f"q{i}", f"a{i}", record_id=str(i)) for i in range(30)]
    shuffled = random.Random(0).sample(items, len(items))
    first, second = run(*items, max_conversations=7), run(*shuffled, max_conversations=7)
    assert first.conversations == second.conversations
    assert len(first.conversations) == 7
    assert reasons(first) == ["conversation_limit"] * 23


def test_the_split_depends_on_the_conversation_alone_and_has_the_share_asked_for() -> None:
    ids = [talk(f"q{i}", "a").conversation_id for i in range(2000)]
    held_out = {i for i in ids if assign_split(i, validation_share=0.1, seed=1) == "validation"}
    # Binomial(2000, 0.1): outside of 140..260 with probability below 1e-5.
    assert 140 < len(held_out) < 260
    wider = {i for i in ids if assign_split(i, validation_share=0.2, seed=1) == "validation"}
    assert held_out < wider
    assert {
        i for i in ids if assign_split(i, validation_share=0.0, seed=1) == "validation"
    } == set()


def test_rejects_are_passed_on() -> None:
    reject = Reject("damaged_record", "s", "r")
    result = normalise([reject, talk("q", "a")], max_turns=0, max_conversations=0)
    assert result.rejects == (reject,)

"""samples.json: who wrote which token, exact text, no customer text when it is not wanted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_prep.chat import ChatFormat
from data_prep.token_set import TokenRow
from mtp_train.validate.samples import (
    MAX_SAMPLES,
    Answered,
    Samples,
    choose_samples,
    choose_training_row,
    make_sample,
)
from runtime.request import Generation, SpecStep
from tests.unit.data_prep.helpers import tiny_tokenizer


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny_tokenizer())


def test_every_token_says_who_wrote_it(chat: ChatFormat) -> None:
    (prompt,) = chat.encode(["<|im_start|>user\né?<|im_end|>\n"])
    (output,) = chat.encode(["a東京!"])
    assert len(output) == 8
    generation = Generation(
        "0",
        tuple(prompt),
        tuple(output),
        "length",
        (
            SpecStep((1, 2, 3), 2, 1),  # drafted 1 and 2, the target's 3
            SpecStep((1, 2, 3), 0, 4),  # the target's 4
            SpecStep((1, 2, 3), 3, 5),  # drafted 5, 6 and 7; the target's 8 was trimmed
        ),
    )
    sample = make_sample("set", "maths", generation, chat.decode, k=3)
    content = Samples(3, (sample,)).to_dict()
    assert content == json.loads(json.dumps(content))
    (entry,) = content["samples"]
    assert entry["prompt"] == "<|im_start|>user\né?<|im_end|>\n"
    assert (entry["prompt_set"], entry["category"]) == ("set", "maths")
    assert entry["tau"] == pytest.approx(1 + 5 / 3)
    assert [(token["by"], token.get("position")) for token in entry["tokens"]] == [
        ("target", None),
        ("draft", 1),
        ("draft", 2),
        ("target", None),
        ("target", None),
        ("draft", 1),
        ("draft", 2),
        ("draft", 3),
    ]
    assert [token["text"] for token in entry["tokens"]] == ["a", "", "", "東", "", "", "京", "!"]
    assert content["training_row"] is None


def answered(name: str, categories: list[str]) -> Answered:
    generations = [
        Generation(str(index), (5,), (index + 3,), "length") for index in range(len(categories))
    ]
    return Answered(name, categories, generations)


def test_samples_are_of_different_categories_and_of_every_set(chat: ChatFormat) -> None:
    many = answered("a", [f"c{index // 2}" for index in range(20)])
    chosen = choose_samples(
        [many, answered("b", ["b"] * 3), answered("c", ["c"])], chat.decode, k=1
    )
    assert len(chosen) == MAX_SAMPLES
    assert [(s.prompt_set, s.category) for s in chosen] == [
        ("a", "c0"),
        ("b", "b"),
        ("c", "c"),
        *(("a", f"c{index}") for index in range(1, 6)),
    ]
    firsts = [many.generations[2 * index] for index in range(6)]
    texts = {s.category: s.tokens[0].text for s in chosen if s.prompt_set == "a"}
    assert texts == {f"c{i}": chat.decode(g.output_ids) for i, g in enumerate(firsts)}


def test_the_training_row_is_readable_and_shows_its_mask(chat: ChatFormat) -> None:
    def row(text: str, num_masked: int) -> TokenRow:
        (ids,) = chat.encode([text])
        mask = [False] * (len(ids) - num_masked) + [True] * num_masked
        return TokenRow("c", "s", tuple(ids), tuple(mask))

    long, short = row("x" * 600, 3), row("é answer", 2)
    chosen = choose_training_row([long, short, row("other", 1)], chat.decode)
    assert chosen is not None
    assert chosen.sample_id == short.sample_id
    assert "".join(text for text, _ in chosen.tokens) == "é answer"
    assert [mask for _, mask in chosen.tokens] == list(short.loss_mask)
    content: Any = Samples(1, (), chosen).to_dict()["training_row"]
    assert content["tokens"][-1] == {"text": chosen.tokens[-1][0], "mask": True}
    only = choose_training_row([long], chat.decode)
    assert only is not None
    assert only.sample_id == long.sample_id
    assert choose_training_row([], chat.decode) is None

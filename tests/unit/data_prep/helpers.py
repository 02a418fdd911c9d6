"""A tiny tokenizer and a fake engine: fast, self-contained, and usable from a subprocess."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.answering import Answering, HiddenSink, Question, Reply
from data_prep.conversation import Conversation, Message
from data_prep.token_set import TokenRow
from runtime.request import FinishReason, HiddenRows
from tests.fixtures.fetch_tokenizers import DEFAULT_FOLDER

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the answer to the question is that it depends on what was asked",
    "user assistant system",
]


def tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a sentence, ChatML template, ``<|im_end|>`` ends a turn."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def talk(*contents: str, **kwargs: Any) -> Conversation:
    """A conversation of alternating user and assistant turns."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], text) for i, text in enumerate(contents))
    return Conversation(messages, **kwargs)


def write_sharegpt(path: Path, conversations: dict[str, Sequence[str]]) -> Path:
    names = ("human", "gpt")
    records = [
        {
            "id": key,
            "conversations": [
                {"from": names[i % 2], "value": text} for i, text in enumerate(contents)
            ],
        }
        for key, contents in conversations.items()
    ]
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return path


class FakeEngine:
    """Answers by ``respond(prompt text, question)``, in an order unlike that of the questions.

    Keeps to the contract of ``AnswerEngine``: the stop token is part of the output, the last token
    has no hidden state. Hidden row i is ``[token id, position]``.
    """

    def __init__(
        self,
        tokenizer: Any,
        respond: Callable[[str, Question], str] | None = None,
        *,
        capacity: int = 5,
    ) -> None:
        self.tokenizer = tokenizer
        self.respond = respond or plain_answer
        self.questions: list[Question] = []
        self.capacity = capacity
        self.identity: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self.in_flight: dict[str, tuple[Question, bool]] = {}
        self.most_in_flight = 0

    @contextmanager
    def open(self, hidden_sink: HiddenSink | None = None) -> Iterator[Answering]:
        yield Answering(self, hidden_sink)

    def submit(self, question: Question, *, captures_hidden: bool = False) -> None:
        assert question.key not in self.in_flight
        self.questions.append(question)
        self.in_flight[question.key] = (question, captures_hidden)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def collect(self) -> list[Reply]:
        """The two with the smallest keys."""
        assert self.in_flight
        keys = sorted(self.in_flight)[:2]
        return [self._reply(*self.in_flight.pop(key)) for key in keys]

    def cancel(self) -> None:
        self.in_flight.clear()

    def _reply(self, question: Question, captures_hidden: bool) -> Reply:
        prompt = self.tokenizer.decode(list(question.prompt_ids))
        text = self.respond(prompt, question)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        assert self.tokenizer.eos_token_id in question.sampling.stop_token_ids
        limit = question.sampling.max_tokens
        output_ids = tuple(ids[:limit])
        hidden = hidden_rows(question, output_ids) if captures_hidden else None
        reason: FinishReason = "stop" if len(ids) <= limit else "length"
        return Reply(question.key, output_ids, reason, hidden=hidden)


def plain_answer(prompt: str, question: Question) -> str:
    """Words that depend on the prompt and, when sampling, on the seed."""
    seed = question.sampling.seed if question.sampling.temperature else 0
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).hexdigest()
    return f"the answer {digest[: 4 + int(digest[0], 16)]}"


def hidden_rows(question: Question, output_ids: tuple[int, ...]) -> HiddenRows:
    ids = (question.prompt_ids + output_ids)[:-1]
    hidden_TD = torch.tensor([[token, i] for i, token in enumerate(ids)], dtype=torch.float32)
    return HiddenRows(question.key, ids, hidden_TD)


def prompt_ids(row: TokenRow | Mapping[str, Any]) -> tuple[int, ...]:
    """Everything before the first token the assistant generated."""
    if isinstance(row, TokenRow):
        ids, mask = row.input_ids, row.loss_mask
    else:
        ids, mask = row["input_ids"], row["loss_mask"]
    first = next((index for index, generated in enumerate(mask) if generated), len(ids))
    return tuple(ids[:first])


def npm_tokenizer(name: str) -> Any:
    """A fetched tokenizer; without it skip, or fail where MTP_REQUIRE_TOKENIZERS is set."""
    from transformers import AutoTokenizer

    folder: Path = DEFAULT_FOLDER / name
    if not folder.is_dir():
        reason = f"{folder} is absent (python tests/fixtures/fetch_tokenizers.py)"
        if os.environ.get("MTP_REQUIRE_TOKENIZERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return AutoTokenizer.from_pretrained(folder)

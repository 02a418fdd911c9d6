"""A tiny tokenizer and a fake engine: fast, self-contained, and usable from a subprocess."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.conversation import Conversation, Message
from data_prep.token_set import TokenRow
from runtime.request import Generation, HiddenRows, Request
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
    """Answers by ``respond(prompt text, sampling seed)``, in an order unlike the requests'.

    Keeps to the contract of ``runtime.engine.Engine.generate``: the stop token is part of the
    output, the last token has no hidden state. Hidden row i is ``[token id, position]``.
    """

    def __init__(
        self,
        tokenizer: Any,
        respond: Callable[[str, Request], str] | None = None,
        *,
        hidden_first: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.respond = respond or plain_answer
        self.requests: list[Request] = []
        self.hidden_first = hidden_first

    def generate(
        self,
        requests: Sequence[Request],
        *,
        hidden_sink: Callable[[HiddenRows], None] | None = None,
        on_finish: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        assert len({r.request_id for r in requests}) == len(requests)
        self.requests.extend(requests)
        done = {}
        for request in sorted(requests, key=lambda r: r.request_id):
            generation = self._finish(request)
            done[request.request_id] = generation
            calls = [lambda g=generation: on_finish(g) if on_finish else None]
            if hidden_sink is not None:
                calls.append(lambda g=generation: hidden_sink(hidden_rows(g)))
            for call in reversed(calls) if self.hidden_first else calls:
                call()
        return [done[request.request_id] for request in requests]

    def _finish(self, request: Request) -> Generation:
        prompt = self.tokenizer.decode(list(request.prompt_ids))
        text = self.respond(prompt, request)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        assert self.tokenizer.eos_token_id in request.sampling.stop_token_ids
        limit = request.sampling.max_tokens
        reason = "stop" if len(ids) <= limit else "length"
        return Generation(request.request_id, request.prompt_ids, tuple(ids[:limit]), reason)


def plain_answer(prompt: str, request: Request) -> str:
    """Words that depend on the prompt and, when sampling, on the seed."""
    seed = request.sampling.seed if request.sampling.temperature else 0
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).hexdigest()
    return f"the answer {digest[: 4 + int(digest[0], 16)]}"


def hidden_rows(generation: Generation) -> HiddenRows:
    ids = (generation.prompt_ids + generation.output_ids)[:-1]
    hidden_TD = torch.tensor([[token, i] for i, token in enumerate(ids)], dtype=torch.float32)
    return HiddenRows(generation.request_id, ids, hidden_TD)


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

"""Pieces of text per token: exact, and without decoding everything again for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.detokenize import PieceDecoder, split_text

TEXTS = [
    "plain words",
    "a\nb\n\n  c",
    "naïve — 東京 👩\u200d💻 ok",
    "👍",
    " lead and trail ",
    "\ufffd x \ufffd",
]


def byte_level() -> Tokenizer:
    """One token per byte: every character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """A mark for the space, bytes for what is no letter; the first space is dropped."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz\n"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {letter: 257 + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def decoder_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_pieces_concatenate_to_the_decoded_text(
    make: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = split_text(ids, decoder_of(tokenizer))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces).strip() == text.strip()
    assert not caplog.records, "no need for the slow way"


def test_a_character_of_several_tokens_is_the_text_of_its_last() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a東b").ids
    assert split_text(ids, decoder_of(tokenizer)) == ["a", "", "", "東", "b"]


def test_special_tokens_and_half_characters_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level()
    half = tokenizer.encode("東").ids[:2]
    decode = decoder_of(tokenizer)
    for ids in ([*half, 256], [256, *half], half, [*half, *tokenizer.encode("x").ids, *half]):
        assert "".join(split_text(ids, decode)) == decode(ids)
    assert split_text([], decode) == []
    assert not caplog.records, "no need for the slow way"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=30))
def test_any_ids_concatenate_exactly(ids: list[int]) -> None:
    decode = decoder_of(_BYTES)
    assert "".join(split_text(ids, decode)) == decode(ids)


_BYTES = byte_level()


def test_each_token_is_decoded_with_its_neighbours_only() -> None:
    tokenizer = byte_level()
    lengths: list[int] = []

    def count(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decoder_of(tokenizer)(ids)

    ids = tokenizer.encode("words and 東京 " * 100).ids
    split_text(ids, count)
    assert max(lengths[:-1]) <= 8  # the last call decodes all of it, once
    assert len(lengths) <= 2 * len(ids) + 2


def test_a_stream_shows_each_character_as_soon_as_it_is_whole() -> None:
    tokenizer = byte_level()
    decoder = PieceDecoder(decoder_of(tokenizer))
    ids = tokenizer.encode("é!").ids
    assert [decoder.push(i) for i in ids] == ["", "é", "!"]
    assert decoder.flush() == ""
    assert decoder.push(ids[0]) == ""
    assert decoder.flush() == "\ufffd"


def test_a_decoder_that_looks_far_back_is_split_exactly_all_the_same() -> None:
    def decode(ids: Sequence[int], *, sep: str) -> str:
        return sep.join(map(str, ids)) if len(ids) < 4 else sep.join(map(str, ids)).upper() + "."

    strange = partial(decode, sep=" e")
    ids = [1, 2, 3, 4, 5, 6]
    pieces = split_text(ids, strange)
    assert "".join(pieces) == strange(ids)
    assert len(pieces) == 6


def test_the_space_between_words_survives_a_token_without_text() -> None:
    tokenizer = sentence_piece()
    tokenizer.add_special_tokens(["<|end|>"])
    decoder = PieceDecoder(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    ids = tokenizer.encode("ab<|end|> c", add_special_tokens=False).ids
    assert "".join(decoder.push(i) for i in ids) == tokenizer.decode(ids) == "ab c"

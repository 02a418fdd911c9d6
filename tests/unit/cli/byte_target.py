"""A random Llama over bytes with a chat template: every text is a prompt, every answer a text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.runtime.model_fixtures import save_llama

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the three special tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


def save_byte_target(path: Path) -> Path:
    """It ends its turns now and then."""
    tokenizer = byte_tokenizer()
    save_llama(path, vocab_size=len(tokenizer), eos_token_id=2)
    tokenizer.save_pretrained(path)
    return path

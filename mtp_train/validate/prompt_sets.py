"""The evaluation sets as token ids, and what is measured on them.

The first set is measured at every reported K and feeds the rungs; further sets are there for the
breakdown by task and are measured at ``validate.k`` only, as are second turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data_prep.builtin import BUILTIN_SETS
from data_prep.chat import ChatFormat, configured_chat_format
from data_prep.evaluation import (
    EvalPrompt,
    evaluation_prompts,
    second_turn_prompts,
)
from mtp_train.config import Config
from mtp_train.features.target import load_tokenizer
from mtp_train.validate.measure import Measured, measure_acceptance
from mtp_train.validate.subject import Subject
from runtime.detokenize import Decode
from runtime.request import Generation
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

REPORTED_K = (1, 3)  # beside validate.k


@dataclass(frozen=True)
class PromptSet:
    """An evaluation set as token ids.

    ``categories``: one per prompt, or none when the set is one task. ``decode`` gives ids as text,
    where there is a tokenizer. ``follow_up`` makes the second turns out of the answers to these
    prompts; ``None`` when they are not wanted.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    categories: tuple[str, ...] = field(default=(), repr=False)
    decode: Decode | None = field(default=None, repr=False)
    scripts: tuple[str, ...] = field(default=(), repr=False)  # one per prompt, or none
    follow_up: Callable[[Sequence[Generation]], PromptSet] | None = field(default=None, repr=False)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The category of every prompt; the set's name where it has none."""
        return self.categories or (self.name,) * len(self.prompts)


@dataclass(frozen=True)
class MeasuredSet:
    """One measurement and the set it was made on."""

    prompt_set: PromptSet
    measured: Measured


def load_prompt_sets(config: Config, subject: Subject) -> list[PromptSet]:
    """The evaluation sets that ``config`` names, within its limits. At least one is needed."""
    settings = config.validate
    if not settings.sets:
        raise ValueError("validate.sets is empty: name at least one evaluation set")
    tokenizer = load_tokenizer(config.target, subject.target(subject.runtime_dtype).path)
    return [
        _load_set(name, config, tokenizer, limit=_limit(config, index))
        for index, name in enumerate(settings.sets)
    ]


def measure_sets(config: Config, subject: Subject, sets: Sequence[PromptSet]) -> list[MeasuredSet]:
    """Acceptance on every set at every K that is reported of it."""
    settings = config.validate
    measured = []

    def measure(chosen: PromptSet, k: int) -> Measured:
        item = measure_acceptance(
            subject.target(subject.runtime_dtype),
            subject.head(subject.runtime_dtype),
            chosen.prompts,
            k=k,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            engine_config=subject.engine_config,
            prompt_set=chosen.name,
            seed=derive_seed(config.seed, "ladder"),
        )
        _log_measured(item)
        measured.append(MeasuredSet(chosen, item))
        return item

    for index, chosen in enumerate(sets):
        items = {k: measure(chosen, k) for k in draft_lengths(config, is_first=index == 0)}
        if chosen.follow_up is not None:
            measure(chosen.follow_up(items[settings.k].generations), settings.k)
    return measured


def draft_lengths(config: Config, *, is_first: bool = True) -> list[int]:
    """The K that a set is measured at."""
    return sorted({*REPORTED_K, config.validate.k}) if is_first else [config.validate.k]


def _limit(config: Config, index: int) -> int:
    settings = config.validate
    if index and settings.max_further_prompts:
        return settings.max_further_prompts
    return settings.max_prompts


def _load_set(name: str, config: Config, tokenizer: Any, *, limit: int) -> PromptSet:
    data = config.data
    template: dict[str, Any] = {
        "chat_template": data.chat_template,
        "chat_template_kwargs": data.chat_template_kwargs,
    }
    chat = configured_chat_format(tokenizer, data)
    chosen = evaluation_prompts(name, tokenizer, limit, **template)

    def follow_up(generations: Sequence[Generation]) -> PromptSet:
        pairs = zip(chosen, generations, strict=True)
        answers = {prompt.id: _answer_text(generation, chat) for prompt, generation in pairs}
        second = second_turn_prompts(name, tokenizer, answers, **template)
        return _as_set(f"{name}/turn2", second, chat.decode)

    prompt_set = _as_set(name, chosen, chat.decode)
    wants_second = config.validate.turns == 2 and BUILTIN_SETS[name].has_second_turns
    return replace(prompt_set, follow_up=follow_up) if wants_second else prompt_set


def _as_set(name: str, prompts: Sequence[EvalPrompt], decode: Decode) -> PromptSet:
    return PromptSet(
        name,
        tuple(prompt.prompt_ids for prompt in prompts),
        tuple(prompt.category for prompt in prompts),
        decode,
        tuple(prompt.script for prompt in prompts),
    )


def _answer_text(generation: Generation, chat: ChatFormat) -> str:
    """What a client would send back as history: no token that ends the turn."""
    ids = generation.output_ids
    return chat.decode(ids[:-1] if generation.finish_reason == "stop" else ids)


def _log_measured(item: Measured) -> None:
    logger.info(
        "%s, K=%d, T=%g, %s drafts: tau %.3f over %d steps (%.0f tokens/s)",
        item.prompt_set,
        item.k,
        item.temperature,
        item.draft_mode,
        item.acceptance.tau,
        item.acceptance.num_drafts,
        item.tokens_per_s,
    )

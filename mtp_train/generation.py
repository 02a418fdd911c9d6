"""One prompt, answered with the draft and then without it, both timed in the same process.

Seconds count the engine's steps only, not what is printed between them. Ctrl-C ends the decoding
that is running between two steps; what there is until then is the answer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from data_prep.chat import configured_chat_format
from data_prep.conversation import Message
from mtp_train.config import Config
from mtp_train.distributed import init_process_group
from mtp_train.draft_model import open_draft_model
from mtp_train.features.target import load_tokenizer
from mtp_train.foreign.importing import with_native_heads
from mtp_train.native.reader import keep_native_head
from mtp_train.run_dir import PARITY_NAME, RunDirectory, read_json
from mtp_train.validate.measure import fit_engine
from mtp_train.validate.report import fastest_k
from mtp_train.validate.subject import open_subject
from runtime.cpu import set_threads
from runtime.engine import Engine
from runtime.head_spec import CONFIG_NAME
from runtime.metrics import Acceptance, pool_acceptance
from runtime.request import FinishReason, Generation, Request, SamplingParams, SpecStep, TokenEvent
from runtime.seeds import derive_seed

OnEvent = Callable[[TokenEvent], None]
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class TimedRun:
    """One decoded answer. ``decode_s`` begins after the first token. Seconds in the engine."""

    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    steps: tuple[SpecStep, ...]
    first_token_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first; 0 when there are none."""
        return (len(self.output_ids) - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Answer:
    """The answer (with the draft, where there is one) and the plain run of the same length."""

    run: TimedRun
    plain: TimedRun | None
    acceptance: Acceptance | None
    interrupted: bool

    @property
    def speedup(self) -> float | None:
        """Tokens/s with the draft over those without it."""
        if self.plain is None or not self.plain.tokens_per_s:
            return None
        return self.run.tokens_per_s / self.plain.tokens_per_s

    @property
    def first_difference(self) -> int | None:
        """Index of the first token in which the two runs differ."""
        plain = self.plain.output_ids if self.plain else ()
        pairs = zip(self.run.output_ids, plain, strict=False)
        return next((i for i, (ours, other) in enumerate(pairs) if ours != other), None)


@dataclass
class Answering:
    """A prompt with everything loaded that answers it. ``k = 0``: no head, plain text."""

    config: Config
    tokenizer: Any = field(repr=False)
    prompt: str
    prompt_ids: tuple[int, ...]
    k: int
    plain_engine: Engine = field(repr=False)
    draft_engine: Engine | None = field(repr=False)
    hint: str = ""

    def answer(self, on_event: OnEvent, on_end: Callable[[], None] = lambda: None) -> Answer:
        """Decode, handing out the events as they come; then, after ``on_end``, time plain
        decoding of as many tokens (``generate.compare``).
        """
        settings = self.config.generate
        sampling = SamplingParams(
            temperature=settings.temperature,
            seed=derive_seed(self.config.seed, "generate"),
            max_tokens=settings.max_tokens,
        )
        plain = None
        with _interruptible() as is_stopped:
            engine = self.draft_engine or self.plain_engine
            run = decode_timed(engine, self.prompt_ids, sampling, on_event, is_stopped)
            on_end()
            compares = settings.compare and self.draft_engine is not None
            if compares and len(run.output_ids) > 1 and not is_stopped():
                same = SamplingParams(
                    temperature=sampling.temperature,
                    seed=sampling.seed,
                    max_tokens=len(run.output_ids),
                    ignore_eos=True,
                )
                plain = decode_timed(
                    self.plain_engine, self.prompt_ids, same, lambda event: None, is_stopped
                )
            interrupted = is_stopped()
        return Answer(run, plain, self._pool(run) if self.k else None, interrupted)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text without special tokens, nothing tidied up."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _pool(self, run: TimedRun) -> Acceptance:
        generation = Generation("", self.prompt_ids, run.output_ids, run.finish_reason, run.steps)
        return pool_acceptance([generation], self.k)


def _measured_k(head_path: Path) -> int | None:
    """What the ladder found fastest with this head, where it has been run."""
    file = head_path / PARITY_NAME
    return fastest_k(read_json(file)) if file.is_file() else None


def open_answering(config: Config, prompt: str) -> Answering:
    """Load target and head or draft model, render and check the prompt, run both engines once.

    Raises ``ValueError`` when the prompt and ``generate.max_tokens`` exceed the target's context,
    when ``generate.head`` is no head, the head is of another target, or the draft model has
    another vocabulary.
    """
    device = init_process_group(device=config.target.device).device
    if device.type == "cpu":
        set_threads(config.runtime.num_threads)
    keep_native_head(config)
    config = with_native_heads(config)
    run = RunDirectory.from_config(config)
    settings = config.generate
    head_path = Path(settings.head) if settings.head else run.head
    subject = open_subject(config, head_path, device=device)
    dtype = subject.runtime_dtype
    target = subject.target(dtype)
    tokenizer = load_tokenizer(config.target, target.path)
    prompt_ids = _encode(config, tokenizer, prompt)
    draft_model = None
    if settings.draft_model or settings.draft_layers:
        draft_model = open_draft_model(config, target, tokenizer)
    has_head = bool(settings.head or config.validate.head) or (head_path / CONFIG_NAME).is_file()
    k = 0
    if draft_model is not None:  # the head's figures say nothing of it
        k = settings.k or config.validate.k
    elif has_head:
        k = settings.k or _measured_k(subject.head_path) or config.validate.k
    limit, whose = target.config.max_position_embeddings, "target"
    if draft_model is not None and draft_model.config.max_position_embeddings < limit:
        limit, whose = draft_model.config.max_position_embeddings, "draft model"
    if len(prompt_ids) + settings.max_tokens + k > limit:
        raise ValueError(
            f"generate.max_tokens={settings.max_tokens}: with {len(prompt_ids)} prompt tokens and "
            f"K={k} that exceeds the {whose}'s {limit} positions; at most "
            f"{max(limit - len(prompt_ids) - k, 0)} fit"
        )

    def open_engine(k: int) -> Engine:
        fitted = fit_engine(
            config.runtime,
            [len(prompt_ids)],
            max_tokens=max(settings.max_tokens, _WARM_UP_TOKENS * (k + 1)),
            k=k,
            max_running=1,
        )
        return Engine(
            target.model,
            config=replace(fitted, draft_length=config.runtime.draft_length),
            eos_token_ids=target.eos_token_ids,
            draft=(draft_model or subject.head(dtype)) if k else None,
        )

    answering = Answering(
        config=config,
        tokenizer=tokenizer,
        prompt=prompt,
        prompt_ids=prompt_ids,
        k=k,
        plain_engine=open_engine(0),
        draft_engine=open_engine(k) if k else None,
        hint="" if k else _no_head(run, head_path),
    )
    _warm_up(answering)
    return answering


def decode_timed(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    on_event: OnEvent,
    is_stopped: Callable[[], bool] = lambda: False,
) -> TimedRun:
    """Decode one prompt; ``is_stopped`` is asked after every step and ends it as aborted."""
    output: list[int] = []
    steps: list[SpecStep] = []
    finish_reason: FinishReason = "abort"
    first_token_s = decode_s = 0.0
    with closing(engine.stream([Request("prompt", tuple(prompt_ids), sampling)])) as stream:
        while True:
            started = time.perf_counter()
            event = next(stream, None)
            seconds = time.perf_counter() - started
            if event is None:
                break
            if output:
                decode_s += seconds
            else:
                first_token_s = seconds
            output.extend(event.token_ids)
            finish_reason = event.finish_reason or finish_reason
            if event.step is not None:
                steps.append(event.step)
            on_event(event)
            if is_stopped():
                break
    return TimedRun(tuple(output), finish_reason, tuple(steps), first_token_s, decode_s)


def _encode(config: Config, tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """As a server would: through the chat template, or as a bare text with its special tokens."""
    if config.generate.raw:
        return tuple(tokenizer(prompt)["input_ids"])
    chat = configured_chat_format(tokenizer, config.data)
    (ids,) = chat.encode([chat.prompt_text((Message("user", prompt),), ())])
    return tuple(ids)


def _no_head(run: RunDirectory, head_path: Any) -> str:
    return (
        f"no head at {head_path}: plain text. Train one with mtp train run.name={run.root.name}, "
        "or name one with generate.head=DIR"
    )


def _warm_up(answering: Answering) -> None:
    """Neither run pays for what happens once: memory, threads, kernels."""
    for engine in (answering.plain_engine, answering.draft_engine):
        if engine is not None:
            count = _WARM_UP_TOKENS * (engine.config.num_draft_tokens + 1)
            sampling = SamplingParams(max_tokens=count, ignore_eos=True)
            decode_timed(engine, answering.prompt_ids[-8:], sampling, lambda event: None)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a question that is asked between steps; a second one kills."""
    stopped = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)

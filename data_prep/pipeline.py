"""``prepare``: sources to a finished token set, once.

Idempotent: a finished set with the same fingerprint is reported and left alone; one with another
fingerprint is refused and the difference named. An interrupted run is started again from the
beginning, except that regenerated answers come from their journal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.answering import Answering, HiddenSink, OpenAnswering
from data_prep.chat import ChatFormat, configured_chat_format
from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Record, Reject
from data_prep.coverage import Origin, Part
from data_prep.fingerprints import (
    check_same,
    fingerprint_inputs,
    tokenizer_hash,
    with_identity,
)
from data_prep.journal import Journal
from data_prep.normalise import Normalised, Split, assign_split, normalise, token_prompt_hash
from data_prep.progress import Progress
from data_prep.regenerate import RegenerateContext, journal_header, regenerated_rows
from data_prep.rows import Results, recorded_rows, tokenized_row
from data_prep.sources import read_source
from data_prep.statistics import Lengths, SplitStatistics, StatisticsCounter, reject_counts
from data_prep.token_set import (
    FINGERPRINT_FILE,
    VERSION,
    TokenRow,
    TokenSetWriter,
    read_fingerprint,
    write_json,
    write_lines,
)

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

JOURNAL_FILE = "regenerated.jsonl"
_PROMPT_TOKENS = 2048  # that a tokenised prompt's script is told by
_CHUNK = 512  # conversations tokenised together
_SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class DataReport:
    """What :func:`prepare` left behind. ``is_new`` is false when it found its finished output."""

    path: Path
    is_new: bool
    fingerprint: str
    splits: Mapping[str, SplitStatistics]
    rejects: Mapping[str, int]
    notes: tuple[str, ...] = ()
    wall_s: float = 0.0


@dataclass
class _Output:
    """Rows as they are accepted, in order, up to the token budget."""

    writers: dict[Split, TokenSetWriter]
    counters: dict[Split, StatisticsCounter]
    budget: int
    seen: set[str] = field(default_factory=set)
    is_full: bool = False

    def offer(self, row: TokenRow, split: Split, origin: Origin) -> str:
        """Take the row; or say why not."""
        if row.sample_id in self.seen:
            return "duplicate_row"
        writer = self.writers[split]
        if split == "train" and self.budget:
            self.is_full |= writer.num_tokens + len(row.input_ids) > self.budget
        if self.is_full:
            return "token_budget"
        self.seen.add(row.sample_id)
        writer.append(row)
        self.counters[split].add(row, origin)
        return ""


def prepare(
    config: DataConfig,
    *,
    out_dir: Path,
    tokenizer: Any,
    seed: int,
    open_answering: OpenAnswering | None = None,
    target_fingerprint: str = "",
    console: Console | None = None,
) -> DataReport:
    """Make the token set of ``config`` in ``out_dir``.

    With ``config.path`` nothing is made: that finished set is checked against the tokenizer and
    reported. Rows come in the order of their conversations' hashes, so ``max_tokens_total`` keeps
    the same rows whatever the order of the sources.

    ``open_answering`` is needed for (and only for) ``regenerate.enabled``, and called only where
    there is work; ``target_fingerprint`` then enters the fingerprint. ``console`` shows progress.

    Raises ``ValueError`` for unusable configuration or sources, for another set in ``out_dir``,
    when nobody answers any more, and when no training row is left.
    """
    options = config.regenerate
    _check_arguments(config, open_answering, target_fingerprint)
    chat = configured_chat_format(tokenizer, config)
    if config.path:
        return _shared_set(config.path, chat)
    out_dir = Path(out_dir)
    inputs = fingerprint_inputs(
        config, chat, seed=seed, target_fingerprint=target_fingerprint if options.enabled else ""
    )
    finished = read_fingerprint(out_dir)
    if finished is not None:
        check_same(out_dir, finished["inputs"], with_identity(inputs, finished["inputs"], config))
        logger.info("%s: finished already, nothing to do", out_dir)
        return _finished_report(out_dir, finished)

    start = time.monotonic()
    out_dir.mkdir(parents=True, exist_ok=True)
    records = normalise(
        _read_all(config),
        max_turns=config.max_turns,
        max_conversations=config.max_conversations,
    )
    rejects = list(records.rejects)
    output = _Output(
        {split: TokenSetWriter() for split in _SPLITS},
        {split: StatisticsCounter(chat) for split in _SPLITS},
        config.max_tokens_total,
    )
    notes: list[str] = []
    with Progress(
        len(records.conversations),
        token_budget=config.max_tokens_total,
        generates=options.enabled,
        console=console,
    ) as bar:
        _fill_tokenized(output, records, config, chat, seed, rejects)
        if options.enabled:
            assert open_answering is not None, "checked above"
            with open_answering() as answering:
                engine = answering.engine
                if engine.identity:
                    inputs["answered_by"] = dict(engine.identity)
                header = journal_header(config, seed=seed, inputs=inputs, identity=engine.identity)
                sink = _required_sink(config, answering)
                with Journal(out_dir / JOURNAL_FILE, header=header) as journal:
                    context = RegenerateContext(
                        chat, engine, journal, config, seed, sink, bar.add_answer
                    )
                    rows = regenerated_rows(records.conversations, context)
                    _fill(output, records.conversations, rows, config, seed, rejects, bar)
                    notes += [*engine.notes, *_retokenised_note(journal)]
        else:
            recorded = _recorded(records.conversations, chat, config)
            _fill(output, records.conversations, recorded, config, seed, rejects, bar)

    counts = reject_counts(rejects)
    if not output.writers["train"].num_rows:
        raise ValueError(_nothing_left(config, counts))
    notes += _notes(records, chat, output)
    for note in notes:
        logger.warning("%s", note)
    report = DataReport(
        path=out_dir,
        is_new=True,
        fingerprint=_combined(output),
        splits={split: output.counters[split].result() for split in _SPLITS},
        rejects=counts,
        notes=tuple(notes),
        wall_s=time.monotonic() - start,
    )
    _write(out_dir, output, rejects, report, inputs)
    return report


def _check_arguments(
    config: DataConfig, open_answering: OpenAnswering | None, target_fingerprint: str
) -> None:
    if config.path:
        return
    if not config.sources:
        raise ValueError("data.sources is empty: name at least one source, or set data.path")
    if config.regenerate.enabled and (open_answering is None or not target_fingerprint):
        raise ValueError(
            "data.regenerate.enabled=true needs an engine and the target's fingerprint: "
            "the target writes the answers"
        )


def _required_sink(config: DataConfig, answering: Answering) -> HiddenSink | None:
    if not config.regenerate.capture_features:
        return None
    if answering.hidden_sink is None:
        raise ValueError("data.regenerate.capture_features=true needs a sink for the hidden states")
    return answering.hidden_sink


def _read_all(config: DataConfig) -> Iterator[Record]:
    for source in config.sources:
        logger.info("reading %s", source)
        yield from read_source(source, format=config.format)


def _fill_tokenized(
    output: _Output,
    records: Normalised,
    config: DataConfig,
    chat: ChatFormat,
    seed: int,
    rejects: list[Reject],
) -> None:
    """Rows that arrive as token ids."""
    share = config.validation_share
    vocab_size = len(chat.tokenizer)
    for record in records.tokenized:
        row = tokenized_row(record, config, vocab_size=vocab_size)
        if isinstance(row, Reject):
            rejects.append(row)
            continue
        split = assign_split(token_prompt_hash(record), validation_share=share, seed=seed)
        end = min(record.loss_mask.index(True), _PROMPT_TOKENS)
        prompt = chat.decode(record.input_ids[:end])  # a template's words are part of it
        origin = Origin(record.source, record.domain, prompt)
        if reason := output.offer(row, split, origin):
            rejects.append(Reject(reason, record.source, record.record_id))


def _recorded(
    conversations: Sequence[Conversation], chat: ChatFormat, config: DataConfig
) -> Results:
    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        yield from zip(chunk, recorded_rows(chunk, chat, config), strict=True)


def _fill(
    output: _Output,
    conversations: Sequence[Conversation],
    results: Results,
    config: DataConfig,
    seed: int,
    rejects: list[Reject],
    bar: Progress,
) -> None:
    """Rows of ``conversations``, taken from ``results`` in order until the budget is spent."""
    num_taken = 0
    with closing(results):
        while not output.is_full and (item := next(results, None)) is not None:
            conversation, result = item
            num_taken += 1
            rejects.extend(result.rejects)
            split = assign_split(
                conversation.prompt_id, validation_share=config.validation_share, seed=seed
            )
            asked = [one.content for one in conversation.messages if one.role == "user"]
            origin = Origin(conversation.source, conversation.domain, "\n".join(asked))
            for row in result.rows:
                if reason := output.offer(row, split, origin):
                    rejects.append(Reject(reason, conversation.source, conversation.record_id))
            bar.advance(output.writers["train"].num_tokens, recalled=result.recalled)
    left = conversations[num_taken:]
    assert output.is_full or not left, f"{len(left)} conversations were never asked"
    rejects.extend(Reject("token_budget", item.source, item.record_id) for item in left)


def _nothing_left(config: DataConfig, counts: Mapping[str, int]) -> str:
    message = f"data.sources={list(config.sources)}: no training row is left"
    if not counts:
        return f"{message}; the sources hold no record at all"
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    message = f"{message}; not used, by reason: {reasons} (docs/data.md explains each)"
    if not config.regenerate.enabled:
        message += "; prompts without answers need data.regenerate.enabled=true"
    return message


def _retokenised_note(journal: Journal) -> list[str]:
    count = journal.num_retokenised
    if not count:
        return []
    return [
        f"{count:,} of {len(journal):,} answers came as text and were tokenised again: their ids "
        "are the tokenizer's, not provably those that were generated"
    ]


def _notes(records: Normalised, chat: ChatFormat, output: _Output) -> list[str]:
    notes = []
    if any(item.tools for item in records.conversations) and not chat.renders_tools:
        notes.append("the chat template ignores tool definitions, as a server with it does")
    if not output.writers["validation"].num_rows:
        notes.append("the validation split is empty: raise data.validation_share or add data")
    return notes


def _write(
    out_dir: Path,
    output: _Output,
    rejects: Sequence[Reject],
    report: DataReport,
    inputs: Mapping[str, Any],
) -> None:
    for split in _SPLITS:
        output.writers[split].write(out_dir / split)
    lines = (json.dumps(asdict(reject), ensure_ascii=False) for reject in rejects)
    write_lines(out_dir / "rejects.jsonl", lines)
    statistics = {
        "splits": {
            name: asdict(item) | {"masked_share": item.masked_share}
            for name, item in report.splits.items()
        },
        "rejects": dict(report.rejects),
        "notes": list(report.notes),
        "wall_s": report.wall_s,
    }
    write_json(out_dir / "statistics.json", statistics)
    content = {split: output.writers[split].content_hash for split in _SPLITS}
    fingerprint = {
        "version": VERSION,
        "fingerprint": report.fingerprint,
        "inputs": dict(inputs),
        "content": content,
    }
    write_json(out_dir / FINGERPRINT_FILE, fingerprint)


def _combined(output: _Output) -> str:
    """The token set's fingerprint: the content of both splits."""
    text = "".join(output.writers[split].content_hash for split in _SPLITS)
    return hashlib.sha256(text.encode()).hexdigest()


def _finished_report(folder: Path, fingerprint: Mapping[str, Any]) -> DataReport:
    saved = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
    return DataReport(
        path=folder,
        is_new=False,
        fingerprint=fingerprint["fingerprint"],
        splits={name: _split_statistics(item) for name, item in saved["splits"].items()},
        rejects=saved["rejects"],
        notes=tuple(saved["notes"]),
        wall_s=saved["wall_s"],
    )


def _split_statistics(saved: Mapping[str, Any]) -> SplitStatistics:
    # a set of an older version has no coverage
    values = {item.name: saved[item.name] for item in fields(SplitStatistics) if item.name in saved}
    for name in ("domains", "prompt_scripts"):
        parts = values.get(name, {})
        values[name] = {label: Part(**part) for label, part in parts.items()}
    for name in ("row_lens", "prompt_lens", "answer_lens"):
        values[name] = Lengths(**values[name])
    return SplitStatistics(**values)


def _shared_set(path: str, chat: ChatFormat) -> DataReport:
    folder = Path(path).expanduser()
    fingerprint = read_fingerprint(folder)
    if fingerprint is None:
        raise ValueError(f"data.path={path!r}: no finished token set there")
    inputs = {"tokenizer": tokenizer_hash(chat.tokenizer), "chat_template": chat.template_hash}
    saved = {key: fingerprint["inputs"].get(key) for key in inputs}
    check_same(folder, saved, inputs)
    return _finished_report(folder, fingerprint)

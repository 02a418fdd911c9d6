"""`mtp export`: from a validated head to a directory that serving engines load.

The directory is read back into the runtime before it takes its place: rung P2 over the exported
tensors, and its chained states against those of the native head.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup
from mtp_train.errors import StageRefusedError
from mtp_train.export.commands import serving_commands
from mtp_train.export.reader import check_export
from mtp_train.export.splice import splice_export
from mtp_train.export.weights import hash_files
from mtp_train.export.writer import ExportReport, write_export
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.native.splice import Splice
from mtp_train.run_dir import PARITY_NAME, RunDirectory, StageRecord, read_json
from mtp_train.validate import p2
from mtp_train.validate.report import fastest_k
from mtp_train.validate.subject import Subject, open_subject, relative_error
from mtp_train.validate.unroll import HiddenSequence, runtime_chain
from runtime.cpu import set_threads
from runtime.files import sha256_file
from runtime.head_spec import DRAFT_VOCAB_NAME, load_head
from runtime.models.heads import build_head
from runtime.models.loader import fingerprint_target
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

# Column halves are summed in the layout's order, not the native one: equal up to rounding.
NATIVE_BOUND = p2.FP32_BOUND
_LENGTHS = (48, 17, 33)  # tokens of the sequences that are read back with


@dataclass(frozen=True)
class ReadBack:
    """Largest relative errors in fp32 over all chained steps, and where they were held."""

    native_hidden: float
    native_logits: float
    p2_note: str


@dataclass(frozen=True)
class ExportOutcome:
    """``report`` is ``None`` when the directory was there already and is still what it was."""

    path: Path
    report: ExportReport | None
    read_back: ReadBack | None
    copy: Splice | None = None  # of the target, with the head in it


def run(config: Config, *, group: ProcessGroup) -> ExportOutcome:
    """Export the run's head, unless that is done. For one rank.

    A directory of another head or of other settings is replaced, and the log says what differs: it
    can be made again at any time. Raises ``ValueError`` for what cannot be exported and
    ``StageRefusedError`` when the written directory does not compute what the head does.
    """
    run_dir = RunDirectory.from_config(config)
    out_dir = run_dir.export(config.export.format)
    target_dir, cache_dir = target_directory(config.target), cache_directory(config.target)
    if not (run_dir.head / "config.json").is_file():
        raise ValueError(f"head={run_dir.head}: there is no head; `mtp train` makes one")
    record = StageRecord(
        run_dir.export_file(config.export.format),
        stage="export",
        fingerprint=export_inputs(config, run_dir, target_dir, cache_dir),
    )
    place = Path(config.export.copy_to)
    if config.export.copy_to and place.exists():
        raise ValueError(f"export.copy_to={place}: exists; name a directory that does not")
    if not config.export.copy_to and _is_done(record, out_dir, target_dir, cache_dir):
        return ExportOutcome(out_dir, None, None)
    record.start()
    seen: list[ReadBack] = []

    def verify(staged: Path) -> None:
        seen.append(read_back(config, run_dir.head, staged, device=group.device))

    report = write_export(
        run_dir.head,
        out_dir,
        format=config.export.format,
        target_dir=target_dir,
        draft_vocab=config.export.draft_vocab,
        unvalidated=config.export.unvalidated,
        max_length=config.export.max_length,
        max_file_bytes=int(config.export.max_file_gb * 1e9),
        cache_dir=cache_dir,
        verify=verify if config.export.read_back else None,
    )
    record.finish(report.record.files_sha256)
    _warn_beyond_trained(report)
    copied = None
    if config.export.copy_to:
        copied = splice_export(out_dir, target_dir, Path(config.export.copy_to))
    return ExportOutcome(out_dir, report, seen[0] if seen else None, copied)


def _warn_beyond_trained(report: ExportReport) -> None:
    file, served = report.path / PARITY_NAME, report.record.head.max_position_embeddings
    lengths = read_json(file).get("lengths", {}) if file.is_file() else {}
    trained = lengths.get("trained")
    if trained and served > trained:
        logger.warning(
            "%s allows %d tokens, but the head was trained on samples of up to %d: how it drafts "
            "beyond is unknown; export.max_length=%d lets engines draft as far as it was trained",
            report.path,
            served,
            trained,
            trained,
        )


def export_inputs(
    config: Config, run_dir: RunDirectory, target_dir: Path, cache_dir: Path
) -> dict[str, Any]:
    """Everything that decides the written directory, by content."""
    parity = run_dir.head / PARITY_NAME
    return {
        "head": hash_files(run_dir.head),
        "parity": sha256_file(parity) if parity.is_file() else "",
        "target": fingerprint_target(target_dir, cache_dir=cache_dir),
        "draft_vocab": config.export.draft_vocab,
        "unvalidated": config.export.unvalidated,
        "max_length": config.export.max_length,
        "max_file_gb": config.export.max_file_gb,
        "read_back": config.export.read_back,
    }


def read_back(config: Config, head_dir: Path, out_dir: Path, *, device: torch.device) -> ReadBack:
    """Hold the exported directory, loaded into the runtime, against training forward and native
    head, over ``validate.k`` chained steps of random tokens.

    Raises ``StageRefusedError`` naming the figure that is out of its bound.
    """
    if device.type == "cpu":
        set_threads(config.runtime.num_threads)
    subject = open_subject(config, out_dir, device=device)
    k = config.validate.k
    sequences = random_sequences(
        subject.spec.vocab_size, seed=derive_seed(config.seed, "export"), k=k
    )
    rung = p2.check(subject, sequences, k=k)
    if not rung.passed:
        wrong = [n for n, bound in rung.bounds.items() if not rung.figures[n] <= bound]
        raise StageRefusedError(
            f"export: the written directory fails P2: {wrong[0]}={rung.figures[wrong[0]]:.2e}, "
            f"allowed {rung.bounds[wrong[0]]:.0e}; nothing was exported"
        )
    hidden, logits = compare_with_native(subject, head_dir, sequences, k=k)
    for name, error in (("hidden states", hidden), ("logits", logits)):
        if not error <= NATIVE_BOUND:
            raise StageRefusedError(
                f"export: {name} of the written directory differ from the native head's by "
                f"{error:.2e} (relative, fp32), allowed {NATIVE_BOUND:.0e}; nothing was exported"
            )
    return ReadBack(hidden, logits, rung.note)


def compare_with_native(
    subject: Subject, head_dir: Path, sequences: list[list[int]], *, k: int
) -> tuple[float, float]:
    """Largest relative errors of states and logits, exported against native, in fp32."""
    spec, tensors = load_head(head_dir)
    served = replace(spec, draft_vocab=subject.spec.draft_vocab)
    if served.draft_vocab is None:
        tensors.pop(DRAFT_VOCAB_NAME, None)
    model = subject.target(torch.float32).model
    native = build_head(served, tensors, model)
    exported = subject.head(torch.float32)
    hidden, logits = 0.0, 0.0
    sequence: HiddenSequence
    for sequence in p2.hidden_sequences(subject, sequences, torch.float32):
        starts = p2.spread(len(sequence.input_ids) - 1 - k, 16)
        pairs = zip(
            runtime_chain(exported, sequence, starts, k),
            runtime_chain(native, sequence, starts, k),
            strict=True,
        )
        for ours, theirs in pairs:
            hidden = max(hidden, relative_error(ours.states_SD, theirs.states_SD))
            logits = max(logits, relative_error(ours.logits_SV, theirs.logits_SV))
    return hidden, logits


def random_sequences(vocab_size: int, *, seed: int, k: int) -> list[list[int]]:
    """Token ids of three sequences long enough for ``k`` chained steps."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocab_size, (length + k,), generator=generator).tolist()
        for length in _LENGTHS
    ]


def check(config: Config) -> Path:
    """Check the directory that ``export.check`` names. Raises ``ValueError`` for what is wrong."""
    directory = Path(config.export.check)
    check_export(
        directory,
        target_dir=target_directory(config.target),
        cache_dir=cache_directory(config.target),
    )
    return directory


def describe(outcome: ExportOutcome, config: Config) -> str:
    """What was written and how to serve it, as lines for a terminal."""
    assert outcome.report is not None, "nothing was written"
    report = outcome.report
    parity_file = report.path / PARITY_NAME
    parity = read_json(parity_file) if parity_file.is_file() else {}
    k = fastest_k(parity) or config.validate.k
    commands = serving_commands(
        report.record.layout,
        target=str(target_directory(config.target)),
        head=str(report.path),
        k=str(k),
        k_plus_one=str(k + 1),
        overrides=report.record.hf_overrides,
    )
    lines = [
        f"{report.path}: {len(report.record.tensors)} tensors, {report.num_bytes / 1e6:.1f} MB",
        "read back: not asked for",
    ]
    if outcome.read_back is not None:
        lines[1] = (
            f"read back: P2 passed ({outcome.read_back.p2_note}); native head within "
            f"{max(outcome.read_back.native_hidden, outcome.read_back.native_logits):.1e}"
        )
    if not report.record.is_validated:
        lines.append("not validated: acceptance of this head is unknown")
    if outcome.copy is not None:
        copy = outcome.copy
        lines.append(
            f"{copy.path}: the target with the head as its own MTP weights ({copy.added}; "
            f"{len(copy.linked)} files linked, {len(copy.rewritten)} without old MTP weights)"
        )
    if report.record.dropped_draft_vocab:
        lines.append(f"draft vocabulary left out: measure again, validate.head={report.path}")
    titles = {"vllm": "vLLM:", "sglang": "SGLang (not run):"}
    for engine, command in commands.items():
        lines += [titles[engine], command]
    return "\n".join(lines)


def _is_done(record: StageRecord, out_dir: Path, target_dir: Path, cache_dir: Path) -> bool:
    differences = record.differences()
    if differences:
        logger.warning("replacing %s: %s", out_dir, "; ".join(differences))
        return False
    if record.state() != "finished" or not out_dir.is_dir():
        return False
    try:
        check_export(out_dir, target_dir=target_dir, cache_dir=cache_dir)
    except ValueError as error:
        logger.warning("writing it again: %s", error)
        return False
    return True

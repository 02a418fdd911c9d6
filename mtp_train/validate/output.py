"""What the ladder leaves behind: ``parity.json``, ``samples.json``, the head's ``README.md``, and
the stage's record.

:func:`write_report` is the only writer of these files. The record says which head, target and
settings the report is of, so that the ladder is not climbed twice for the same figures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.token_set import read_fingerprint
from mtp_train.config import Config, ValidateConfig
from mtp_train.export.commands import README_NAME, refresh_readme
from mtp_train.export.engines import servable_by
from mtp_train.export.reader import is_export, load_any_head
from mtp_train.export.weights import hash_files
from mtp_train.features.manifest import MANIFEST_NAME
from mtp_train.features.target import cache_directory, target_directory, target_dtype
from mtp_train.run_dir import RunDirectory, StageRecord, read_json, write_json_atomic
from mtp_train.validate.journal import RungJournal
from mtp_train.validate.prompt_counts import write_prompt_counts
from mtp_train.validate.report import (
    LadderReport,
    RungResult,
    lengths_markdown,
    measured_markdown,
)
from mtp_train.validate.subject import dtype_name
from runtime.files import sha256_file, write_atomic
from runtime.head_spec import HeadSpec
from runtime.models.loader import fingerprint_target

logger = logging.getLogger(__name__)

SPEED_RUNG = "P5"
# At their defaults they decide nothing that older ladders did not: those stay valid.
_LATER_KEYS = ("old_target", "max_loss")
_TRAINING_ONLY = ("placement", "num_prompts")  # of validate.*: the ladder does not read them


@dataclass(frozen=True)
class LadderRecord:
    """The record of one ladder (leader only). ``stored_verdict``: whether it passed; ``None`` when
    there is no finished report of this head and these settings. ``journal`` holds the rungs that an
    interrupted ladder of them had finished.
    """

    record: StageRecord
    stored_verdict: bool | None
    journal: RungJournal

    @classmethod
    def open(cls, config: Config, *, device: torch.device) -> LadderRecord:
        """Compare what is there with ``config`` and claim it when it has to be measured.

        Unlike other stages, a ladder of another head or of other settings is not refused: its
        report says what it is of, and is replaced. Raises ``ValueError`` for a head that cannot be
        loaded.
        """
        run = RunDirectory.from_config(config)
        load_any_head(run.head)
        record = StageRecord(
            run.validate_file, stage="validate", fingerprint=ladder_inputs(config, device=device)
        )
        if not config.report.samples:  # also where nothing has to be measured again
            run.samples_file.unlink(missing_ok=True)
        verdict = _stored_verdict(record, run)
        if verdict is not None and config.report.samples and not run.samples_file.is_file():
            logger.info("%s is missing: climbing the ladder again", run.samples_file)
            verdict = None
        if verdict is None:
            record.start()
        return cls(record, verdict, RungJournal.of(run.rungs_file, record.fingerprint))

    def finish(self, report: LadderReport, parity_file: Path) -> None:
        """Mark the report complete, unless the head was replaced while it was measured."""
        self.journal.remove()
        if dict(report.head_sha256) != self.record.fingerprint["head"]:
            logger.warning("%s was replaced during validation: validate it again", report.head)
            return
        self.record.finish({"passed": report.passed, "parity_sha256": sha256_file(parity_file)})


def ladder_inputs(config: Config, *, device: torch.device) -> dict[str, Any]:
    """Everything the figures depend on, by content where it is a file."""
    run = RunDirectory.from_config(config)
    validate = asdict(config.validate)
    for name in ("head", *_TRAINING_ONLY):
        del validate[name]
    for name in _LATER_KEYS:
        if validate[name] == getattr(ValidateConfig(), name):
            del validate[name]
    # A ladder is climbed with a head's chain of K drafts: what else there is decides nothing.
    runtime = {
        name: value
        for name, value in asdict(config.runtime).items()
        if "tree" not in name and name not in ("schedule", "draft_length")
    }
    template = config.data.chat_template
    manifests = {split: run.features / split / MANIFEST_NAME for split in ("train", "validation")}
    token_set = read_fingerprint(run.data)
    return {
        "head": hash_files(run.head),
        "target": fingerprint_target(
            target_directory(config.target), cache_dir=cache_directory(config.target)
        ),
        "dtype": dtype_name(target_dtype(config.target, device)),
        "seed": config.seed,
        "validate": validate,
        "runtime": runtime | {"device": str(device)},
        "chat_template": sha256_file(Path(template)) if template else "",
        "chat_template_kwargs": dict(config.data.chat_template_kwargs),
        "p0_max_logprob_gap": config.features.p0_max_logprob_gap,
        "p0_max_kl": config.features.p0_max_kl,
        "token_set": token_set["fingerprint"] if token_set else "",
        "features": {
            split: sha256_file(file) if file.is_file() else "" for split, file in manifests.items()
        },
    }


def write_report(report: LadderReport, spec: HeadSpec, run: RunDirectory) -> None:
    """``parity.json`` into the run directory and beside the head, the head's ``README.md``, and
    ``samples.json`` and ``prompt_counts.json`` into the run directory; without samples an older one
    is removed. Rungs that were not climbed now stay as they were, if they are of these weights.
    """
    places = (run.parity_file, run.head / run.parity_file.name)
    content = _keep_other_rungs(report.to_dict(), places)
    if spec.draft_vocab is not None:
        servable = servable_by(spec)
        content["draft_vocab"] = {
            "size": spec.draft_vocab.size,
            "coverage": spec.draft_vocab.coverage,
            "served_by": str(servable),
            "why": servable.why,
        }
    if report.samples is None:
        run.samples_file.unlink(missing_ok=True)
    else:
        write_json_atomic(run.samples_file, report.samples.to_dict())
    write_prompt_counts(run.prompt_counts_file, report.acceptance, head_sha256=report.head_sha256)
    write_json_atomic(run.parity_file, content)
    if report.change is not None:  # beside the head stays what it did on its own target
        return
    write_json_atomic(run.head / run.parity_file.name, content)
    if is_export(run.head):
        refresh_readme(run.head)
    else:
        write_atomic(run.head / README_NAME, describe_head(report, spec))


def add_rung(result: RungResult, run: RunDirectory, export_dir: Path, *, target: str) -> None:
    """Write one rung that was climbed by itself into every ``parity.json`` of the head: the run's,
    the one beside the head, and the one of the exported directory.

    What else they hold stays, if it is of these weights. ``target``: its fingerprint.
    """
    head_sha256 = hash_files(run.head)
    bare = LadderReport(target=target, head=str(run.head), head_sha256=head_sha256, rungs=())
    record = read_json(run.validate_file) if run.validate_file.is_file() else {}
    written = record.get("outputs", {}).get("parity_sha256")
    is_the_ladders = run.parity_file.is_file() and written == sha256_file(run.parity_file)
    for place in dict.fromkeys((run.root, run.head, export_dir)):
        file = place / run.parity_file.name
        content = read_json(file) if file.is_file() else bare.to_dict()
        if content.get("head_sha256") not in (head_sha256, hash_files(export_dir)):
            content = bare.to_dict()
        content["rungs"][result.name] = result.to_dict(content["head_sha256"])
        content["passed"] = all(rung["passed"] for rung in content["rungs"].values())
        write_json_atomic(file, content)
    refresh_readme(export_dir)
    if is_the_ladders:  # and still is: the other rungs need not be climbed again
        record["outputs"]["parity_sha256"] = sha256_file(run.parity_file)
        write_json_atomic(run.validate_file, record)


def stored_rung(run: RunDirectory, name: str) -> RungResult | None:
    """A rung of the run's ``parity.json``, if that is of the head there is now."""
    if not run.parity_file.is_file():
        return None
    content = read_json(run.parity_file)
    rung = content.get("rungs", {}).get(name)
    if rung is None or content["head_sha256"] != hash_files(run.head):
        return None
    values = {key: value for key, value in rung.items() if key != "head_sha256"}
    return RungResult(name=name, **values)


def _keep_other_rungs(content: dict[str, Any], places: Sequence[Path]) -> dict[str, Any]:
    """``content`` with the rungs of earlier reports that it lacks: a ladder of some rungs does not
    take away what others found, nor the speed that P5 had measured. Each keeps its own time and
    head; those of other weights or another target are left out, with a line in the log.
    """
    rungs = dict(content["rungs"])
    for file in dict.fromkeys(places):
        if not file.is_file():
            continue
        before = read_json(file)
        for name, rung in before.get("rungs", {}).items():
            if name in rungs:
                continue
            of = rung.get("head_sha256", before.get("head_sha256"))
            if of != content["head_sha256"] or before.get("target") != content["target"]:
                logger.info("%s: %s is of another head and is dropped", file, name)
                continue
            rungs[name] = {"climbed_at": "", **rung, "head_sha256": of}
            logger.info("%s: %s stays as it was climbed before", file, name)
            if name == SPEED_RUNG:
                content["speed"] = before.get("speed", [])
    content["rungs"] = dict(sorted(rungs.items()))
    content["passed"] = bool(rungs) and all(rung["passed"] for rung in rungs.values())
    return content


def _vocabulary(spec: HeadSpec) -> str:
    """Whose embedding and ``lm_head`` it takes."""
    if spec.lm_head == spec.embedding == "target":
        return "Embedding and `lm_head` are the target's and not in here."
    if spec.embedding == "own":
        return "Embedding and `lm_head` are its own."
    embedding = "It has no embedding" if spec.kind == "medusa" else "The embedding is the target's"
    return f"{embedding}; `lm_head` is its own."


def describe_head(report: LadderReport, spec: HeadSpec) -> str:
    """Markdown: what the head is, what was measured how, and how to load it."""
    num_params = sum(torch.Size(shape).numel() for shape in spec.tensor_shapes().values())
    hashes = "\n".join(f"- `{name}` sha256 `{value}`" for name, value in report.head_sha256.items())
    return f"""# Draft head ({spec.kind})

Drafts tokens for speculative decoding with one target model, and with no other: the one whose
weights have the fingerprint `{report.target}`. {_vocabulary(spec)}
{num_params:,} values; width {spec.hidden_size}, {spec.num_heads} query and \
{spec.num_kv_heads} key/value heads, vocabulary {spec.vocab_size}.{_draft_vocab(spec)}

{hashes}

## Measured

By `mtp validate`, target and draft together in the inference runtime. \
{measured_markdown(report.to_dict())}

{lengths_markdown(report.to_dict(), served=spec.max_position_embeddings)}

## Load

```python
from pathlib import Path

import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import load_head
from runtime.models.heads import build_head
from runtime.models.loader import load_target

target = load_target(Path("TARGET"), dtype=torch.float32, device=torch.device("cpu"))
spec, tensors = load_head(Path("HEAD"))
engine = Engine(
    target.model,
    config=EngineConfig(num_draft_tokens=3),
    eos_token_ids=target.eos_token_ids,
    draft=build_head(spec, tensors, target.model),
)
```
"""


def _draft_vocab(spec: HeadSpec) -> str:
    vocab, servable = spec.draft_vocab, servable_by(spec)
    if vocab is None:
        return ""
    known = f", {vocab.coverage:.2%} of the answer tokens it was trained on"
    return (
        f"\nDrafts from {vocab.size:,} of these ids{known if vocab.coverage else ''}."
        f"\n\nCan be served by: {servable} ({servable.why})."
    )


def _stored_verdict(record: StageRecord, run: RunDirectory) -> bool | None:
    differences = record.differences()
    if differences:
        logger.info("climbing the ladder again: %s", "; ".join(differences))
        return None
    if record.state() != "finished" or not run.parity_file.is_file():
        return None
    outputs = record.outputs()
    if sha256_file(run.parity_file) != outputs["parity_sha256"]:
        logger.info("%s is not what the ladder wrote: climbing it again", run.parity_file)
        return None
    return bool(outputs["passed"])

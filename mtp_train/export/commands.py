"""How an exported head is served: command lines, and the ``README.md`` beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train.export.layouts import Layout
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.run_dir import PARITY_NAME, read_json
from mtp_train.serving.job import vllm_layout
from mtp_train.validate.report import fastest_k, lengths_markdown, measured_markdown
from runtime.files import write_atomic

README_NAME = "README.md"
DEFAULT_K = 3


def serving_commands(
    layout: Layout,
    *,
    target: str,
    head: str,
    k: str,
    k_plus_one: str,
    overrides: Mapping[str, Any],
) -> dict[str, str]:
    """Command lines by engine; the arguments may be paths, numbers or shell variables.

    ``overrides``: what vLLM is told of the target (:mod:`mtp_train.serving.target_scope`).
    """
    commands = {
        "vllm": _vllm_command if "vllm" in layout.engines else None,
        "sglang": _sglang_command if "sglang" in layout.engines else None,
    }
    return {
        engine: command(
            layout, target=target, head=head, k=k, k_plus_one=k_plus_one, overrides=overrides
        )
        for engine, command in commands.items()
        if command is not None
    }


def _vllm_command(
    layout: Layout,
    *,
    target: str,
    head: str,
    k: str,
    k_plus_one: str,
    overrides: Mapping[str, Any],
) -> str:
    del k_plus_one
    method = vllm_layout(layout.name).method
    speculative = json.dumps({"method": method, "model": head, "num_speculative_tokens": k})
    speculative = speculative.replace(f'"{k}"', k)
    command = f"vllm serve {target} --speculative-config '{speculative}'"
    if overrides:
        command += f" --hf-overrides '{json.dumps(dict(overrides))}'"
    return command


def _sglang_command(
    layout: Layout,
    *,
    target: str,
    head: str,
    k: str,
    k_plus_one: str,
    overrides: Mapping[str, Any],
) -> str:
    del overrides
    return (
        f"python -m sglang.launch_server --model-path {target} "
        f"--speculative-algorithm {layout.sglang_algorithm} "
        f"--speculative-draft-model-path {head} "
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k_plus_one}"
    )


def refresh_readme(out_dir: Path) -> None:
    """Write ``README.md`` from what ``export.json`` and ``parity.json`` of the directory say.

    To be called again by whoever changes ``parity.json``.
    """
    parity_file = out_dir / PARITY_NAME
    parity = read_json(parity_file) if parity_file.is_file() else {}
    record = ExportRecord.read(out_dir / EXPORT_NAME)
    write_atomic(out_dir / README_NAME, describe_export(record, parity))


def describe_export(record: ExportRecord, parity: Mapping[str, Any]) -> str:
    """Markdown: what is in the directory, how to serve it, what was measured and what was not."""
    spec = record.head
    k = fastest_k(parity) or min(DEFAULT_K, spec.num_blocks or DEFAULT_K)
    layout = record.layout
    commands = serving_commands(
        layout,
        target="TARGET",
        head="HEAD",
        k=str(k),
        k_plus_one=str(k + 1),
        overrides=record.hf_overrides,
    )
    reserved = ", ".join(f"`{part}`" for part in layout.reserved_in_paths)
    return f"""---
pipeline_tag: text-generation
tags:
- speculative-decoding
- draft-head
- {layout.name}
---
# Draft head in the {layout.title} layout

For speculative decoding with one target model, and with no other: the one whose weights have the
fingerprint `{spec.target_fingerprint}`. Width {spec.hidden_size}, {spec.num_heads} query and \
{spec.num_kv_heads} key/value heads,
vocabulary {spec.vocab_size}. {layout.describe(spec)}

## Serve

Put the target's directory for `TARGET` and this one for `HEAD`. The directory's path must not
contain {reserved}.

{_serving(record, commands, parity)}

## Measured

{_measured(record, parity)}

## Quantised targets

{_quantisation(record)}

## Check

`mtp export run.name=NAME target.path=TARGET export.check=HEAD` compares every tensor and key with
what was written and with the target; `mtp validate run.name=NAME target.path=TARGET \
validate.head=HEAD` measures it again.
"""


def _quantisation(record: ExportRecord) -> str:
    head = f"The weights here are {record.dtype} and not quantised."
    if record.quantization:
        return (
            f"{head} The target is: {record.quantization}. What is measured above is measured on "
            "it, and the unquantised model is another target."
        )
    return f"""{head} A quantised copy of the target is another
model: its hidden states are not those that this head was trained on, its fingerprint is another,
and nothing above was measured on it. Before serving both, measure the head on it (`mtp validate`
with its directory as `target.path`); train on its features if that costs tokens per step; keep the
head itself out of the engine's quantisation."""


def _serving(record: ExportRecord, commands: Mapping[str, str], parity: Mapping[str, Any]) -> str:
    parts = []
    if "vllm" in commands:
        status = _vllm_status(parity.get("rungs", {}).get("P6"))
        parts.append(f"vLLM ({status}):\n\n```bash\n{commands['vllm']}\n```")
        if record.hf_overrides:
            parts.append(
                "The override belongs to the target: it makes room for one draft layer"
                + (
                    ", and says that this layer is not quantised. "
                    if "quantization_config" in record.hf_overrides
                    else ". "
                )
                + "It changes nothing else."
            )
    if "sglang" in commands:
        parts.append(f"SGLang (not run):\n\n```bash\n{commands['sglang']}\n```")
    return "\n\n".join(parts)


def _measured(record: ExportRecord, parity: Mapping[str, Any]) -> str:
    if record.dropped_draft_vocab:
        warning = (
            "The head was trained for a draft vocabulary, which this layout cannot carry: it was "
            "left out.\nAcceptance has to be measured again on this directory (see Check)."
        )
        if parity.get("head_sha256") != record.files_sha256:
            return warning
    if not parity:
        return "Nothing: this head was exported without validation."
    subject = _subject(record, parity)
    known = lengths_markdown(parity, served=record.head.max_position_embeddings)
    return (
        f"Target and draft together, on {subject}. {measured_markdown(parity)}\n\n{known}".rstrip()
    )


def _subject(record: ExportRecord, parity: Mapping[str, Any]) -> str:
    if parity.get("head_sha256") == record.files_sha256:
        return "this directory"
    return "the native head that this directory was made of"


def _vllm_status(rung: Mapping[str, Any] | None) -> str:
    if rung is None:
        return "not run with this head"
    return f"P6 {'passed' if rung['passed'] else 'FAILED'}: {rung['note']}"

"""``prompt_counts.json``: each prompt's drafts and acceptances, so that two heads can be compared
prompt by prompt.

Kept beside ``parity.json`` and not in it: that file travels with every head and export. It names
the head it is of, and holds digests of the prompts, no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtp_train.run_dir import write_text_atomic
from mtp_train.validate.measure import acceptance_sums
from mtp_train.validate.report import AcceptanceResult, PromptCounts
from runtime.request import Generation

_DIGEST_LEN = 16  # hexadecimal digits: 64 bits


def count_prompts(generations: Sequence[Generation], k: int) -> tuple[PromptCounts, ...]:
    """The counts of every prompt, in the order of ``generations``."""
    sums_PS = acceptance_sums(generations, k)
    return tuple(
        PromptCounts(_digest(generation), int(row[0]), tuple(int(count) for count in row[1:]))
        for generation, row in zip(generations, sums_PS, strict=True)
    )


def write_prompt_counts(
    file: Path, rows: Sequence[AcceptanceResult], *, head_sha256: Mapping[str, str]
) -> None:
    """One line per measurement and a table of numbers each: ``counts[p]`` is
    ``[drafts, accepted 1, …, accepted K]`` of ``prompts[p]``.
    """
    lines = [
        json.dumps(
            {
                "prompt_set": row.prompt_set,
                "k": row.counts.k,
                "temperature": row.temperature,
                "draft_mode": row.draft_mode,
                "max_tokens": row.max_tokens,
                "prompts": [prompt.digest for prompt in row.prompts],
                "counts": [[prompt.num_drafts, *prompt.accepted] for prompt in row.prompts],
            },
            ensure_ascii=False,
        )
        for row in rows
        if row.prompts
    ]
    head = json.dumps(dict(head_sha256))
    body = ",\n".join(lines)
    write_text_atomic(file, f'{{"head_sha256": {head},\n"rows": [\n{body}\n]}}\n')


def _digest(generation: Generation) -> str:
    ids = ",".join(map(str, generation.prompt_ids))
    return hashlib.sha256(ids.encode()).hexdigest()[:_DIGEST_LEN]

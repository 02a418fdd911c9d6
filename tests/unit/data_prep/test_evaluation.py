from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep import evaluation
from data_prep.evaluation import evaluation_prompts, second_turn_prompts


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "total", "first_id", "categories"),
    [("mtbench", 80, "81", 8), ("humaneval", 164, "HumanEval/0", 1), ("gsm8k", 1319, "0", 1)],
)
def test_installed_sets_are_complete(
    tiny: Any, name: str, total: int, first_id: str, categories: int
) -> None:
    prompts = evaluation_prompts(name, tiny)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == total
    assert prompts[0].id == first_id
    assert len({prompt.category for prompt in prompts}) == categories
    spread = evaluation_prompts(name, tiny, 8)
    assert len(spread) == 8
    assert len({prompt.category for prompt in spread}) == categories
    assert set(spread) <= set(prompts)


def test_prompts_are_the_first_turn_as_it_is_served(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "question.jsonl.gz"
    rows = [
        {"question_id": i, "category": f"c{i % 3}", "turns": [f"q{i}", "then"]} for i in range(9)
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    monkeypatch.setattr(evaluation, "builtin_path", lambda name: path)
    prompts = evaluation_prompts("mtbench", tiny, 3)
    assert [(prompt.id, prompt.category) for prompt in prompts] == [
        ("0", "c0"),
        ("3", "c0"),
        ("6", "c0"),
    ]
    served = tiny.apply_chat_template(
        [{"role": "user", "content": "q3"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert prompts[1].prompt_ids == tuple(served)
    assert len(evaluation_prompts("mtbench", tiny, 100)) == 9


def test_second_turns_follow_the_models_own_answers(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "question.jsonl"
    turns = [["q0", "then0"], ["only"], ["q2", "then2"]]
    rows = [{"question_id": i, "category": f"c{i}", "turns": t} for i, t in enumerate(turns)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(evaluation, "builtin_path", lambda name: path)
    prompts = second_turn_prompts("mtbench", tiny, {"2": "said", "1": "x", "0": "answered"})
    assert [(p.id, p.category, p.turn) for p in prompts] == [("2", "c2", 2), ("0", "c0", 2)]
    served = tiny.apply_chat_template(
        [
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": "said"},
            {"role": "user", "content": "then2"},
        ],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert prompts[0].prompt_ids == tuple(served)


def test_an_unknown_set_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="'sharegpt': must be one of"):
        evaluation_prompts("sharegpt", tiny)

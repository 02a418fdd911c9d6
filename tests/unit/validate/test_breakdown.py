"""The breakdown adds up to the pooled counts; kinds of token are what the text shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mtp_train.validate.bootstrap import Interval
from mtp_train.validate.breakdown import break_down, context_label, furthest_context
from mtp_train.validate.measure import Measured, acceptance_sums, measure_acceptance, tau_interval
from mtp_train.validate.report import lengths_markdown
from mtp_train.validate.token_kinds import find_spans, token_kinds
from runtime.metrics import pool_acceptance
from runtime.request import Generation, SpecStep
from tests.unit.runtime.engine_fixtures import random_head, tiny_target
from tests.unit.validate.subjects import RUNTIME, make_prompts

# The eleven tokens of the tiny target, so that random text has fences and thoughts.
PIECES = ["a", " b", "\n", "```", "\n```\n", "<think>", "</think>", "<tool_call>", "x", "é", "."]


def decode(ids: tuple[int, ...]) -> str:
    return "".join(PIECES[i] for i in ids)


def measured_of(generations: list[Generation], k: int) -> Measured:
    return Measured(
        prompt_set="set",
        k=k,
        temperature=0.0,
        draft_mode="argmax",
        max_tokens=40,
        acceptance=pool_acceptance(generations, k),
        tau_interval=Interval(1.0, 2.0, 0.95),
        wall_s=1.0,
        generations=tuple(generations),
    )


def test_the_labels_of_every_dimension_add_up_to_the_pooled_counts(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    measured = measure_acceptance(
        target,
        random_head(target),
        make_prompts((5, 1, 19, 120, 127, 128, 250)),
        k=2,
        max_tokens=40,
        temperature=0.0,
        engine_config=RUNTIME,
        prompt_set="random",
    )
    categories, scripts = list("xyxyzxz"), ["Latin", "Han"] * 3 + ["Latin"]
    rows = break_down(measured, categories=categories, scripts=scripts, decode=decode)
    labels = {
        dimension: [row.label for row in rows if row.dimension == dimension]
        for dimension in ("task", "script", "context", "token_kind")
    }
    assert labels["task"] == ["x", "y", "z"]
    assert labels["script"] == ["Latin", "Han"]
    assert labels["context"] == ["0–128 tokens", "128–256 tokens", "256–512 tokens"]
    assert len(labels["token_kind"]) > 1, "the answers have one kind only: choose other pieces"
    want = acceptance_sums(measured.generations, 2).sum(0)
    for dimension in labels:
        part = [row for row in rows if row.dimension == dimension]
        sums = np.sum([(row.num_drafts, *row.accepted) for row in part], axis=0)
        np.testing.assert_array_equal(sums, want)
        assert all((row.prompt_set, row.k, row.temperature) == ("random", 2, 0.0) for row in part)
    by_label = {row.label: row for row in rows}
    own = [g for g, c in zip(measured.generations, "xyxyzxz", strict=True) if c == "x"]
    interval = tau_interval(own, 2)
    assert by_label["x"].interval == (interval.low, interval.high)
    assert by_label["x"].num_prompts == 3
    assert by_label["x"].tau == pool_acceptance(own, 2).tau


def test_a_draft_counts_where_its_first_token_stands() -> None:
    prompt = tuple(range(126))
    generation = Generation(
        "0",
        tuple(i % 11 for i in prompt),
        #  a  \n ``` \n  x  x \n```\n a <think>
        (0, 2, 3, 2, 8, 8, 4, 0, 5),
        "length",
        (
            SpecStep((8, 3), 0, 1),  # position 127; "\n" before the fence is chat
            SpecStep((3, 2), 2, 2),  # position 128; the fence is code
            SpecStep((0, 0), 0, 5),  # code
            SpecStep((0, 0), 0, 6),  # the closing fence is code
            SpecStep((0, 0), 1, 7),  # chat
            SpecStep((5,), 0, 8),  # clipped: no draft
        ),
    )
    rows = break_down(measured_of([generation], 2), categories=(), decode=decode)
    table = {row.label: (row.num_drafts, row.accepted) for row in rows}
    assert table == {
        "set": (5, (2, 1)),
        "0–128 tokens": (1, (0, 0)),
        "128–256 tokens": (4, (2, 1)),
        "chat": (2, (1, 0)),
        "code": (3, (1, 1)),
    }
    assert {row.interval for row in rows} == {None}, "one prompt has no interval"
    assert rows[0].to_dict() == {
        "dimension": "task",
        "label": "set",
        "prompt_set": "set",
        "k": 2,
        "temperature": 0.0,
        "drafts": 5,
        "accepted": [2, 1],
        "rates": [0.4, 0.2],
        "tau": 1.6,
        "tau_interval": None,
        "prompts": 1,
    }


def test_drafts_inside_and_beyond_the_trained_length_are_told_apart() -> None:
    prompt = tuple(i % 11 for i in range(126))
    steps = (SpecStep((8, 3), 2, 1), SpecStep((3, 2), 1, 4), SpecStep((5,), 0, 9))
    measured = measured_of([Generation("0", prompt, (0,) * 10, "length", steps)], 2)
    rows = break_down(measured, categories=(), trained_len=127)
    table = {r.label: r.accepted for r in rows if r.dimension == "trained_length"}
    assert table == {"up to the trained 127": (1, 1), "beyond the trained 127": (1, 0)}
    assert furthest_context([measured]) == 130, "a clipped step is no draft"
    assert furthest_context([]) is None
    inside = break_down(measured, categories=(), trained_len=5000)
    assert [r.label for r in inside if r.dimension == "trained_length"] == [
        "up to the trained 5,000"
    ]


def test_a_readme_says_how_far_the_head_is_known() -> None:
    known = {"lengths": {"trained": 512, "measured": 900}}
    text = lengths_markdown(known, served=8192)
    assert text == (
        "Trained on up to 512 tokens, measured behind up to 900; the configuration allows 8,192. "
        "Acceptance beyond 900 tokens is unknown."
    )
    assert "unknown" not in lengths_markdown(known, served=512)
    assert lengths_markdown({}, served=8192) == ""


def test_without_text_the_kinds_are_left_out() -> None:
    generation = Generation("0", (1,), (0, 1, 2), "length", (SpecStep((1, 2), 0, 1),))
    rows = break_down(measured_of([generation], 2), categories=["x"])
    assert [row.dimension for row in rows] == ["task", "context"]


@pytest.mark.parametrize(
    ("num_tokens", "label"),
    [
        (0, "0–128 tokens"),
        (127, "0–128 tokens"),
        (128, "128–256 tokens"),
        (511, "256–512 tokens"),
        (512, "512–1k tokens"),
        (5000, "4k–8k tokens"),
    ],
)
def test_context_buckets(num_tokens: int, label: str) -> None:
    assert context_label(num_tokens) == label


@pytest.mark.parametrize(
    ("text", "prompt", "spans"),
    [
        ("no marks `inline` ``too``", "", []),
        ("a\n```py\nx\n```\nb", "", [("code", "```py\nx\n```")]),
        ("a\n  ````\n```\n````", "", [("code", "  ````\n```\n````")]),
        ("~~~\nx\n```\n~~~\nb", "", [("code", "~~~\nx\n```\n~~~")]),
        ("```\nnever closed", "", [("code", "```\nnever closed")]),
        ("in line ```x``` is none", "", []),
        ("```one line``` is none\n```\nx", "", [("code", "```\nx")]),
        ("<think>\n```\nx\n</think>b", "", [("thinking", "<think>\n```\nx\n</think>")]),
        (
            "so\n</think>b <think>",
            "u\n<think>\n",
            [("thinking", "so\n</think>"), ("thinking", "<think>")],
        ),
        ("so </think>", "what is <think>?", []),
        ("[THINK]x[/THINK]y", "", [("thinking", "[THINK]x[/THINK]")]),
        (
            'a<tool_call>\n{"name": "f"}\n</tool_call><tool_call>g</tool_call>',
            "",
            [
                ("tool call", '<tool_call>\n{"name": "f"}\n</tool_call>'),
                ("tool call", "<tool_call>g</tool_call>"),
            ],
        ),
        ('[TOOL_CALLS]f{"a": 1}', "", [("tool call", '[TOOL_CALLS]f{"a": 1}')]),
        ("<|python_tag|>f()<|eom_id|>", "", [("tool call", "<|python_tag|>f()<|eom_id|>")]),
    ],
)
def test_spans_of_an_answer(text: str, prompt: str, spans: list[tuple[str, str]]) -> None:
    found = find_spans(text, prompt=prompt)
    assert [(span.kind, text[span.start : span.end]) for span in found] == spans


def test_a_token_has_the_kind_of_its_first_character() -> None:
    pieces = ["", "é", "\n``", "`py\n", "", "é", "\n", "```", "\nb", "<th", "ink>", "c"]
    assert token_kinds(pieces) == [
        *("chat", "chat", "chat", "code", "code", "code", "code", "code", "chat"),
        *("thinking", "thinking", "thinking"),
    ]

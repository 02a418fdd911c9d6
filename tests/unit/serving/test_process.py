"""The engine that is started: what it is asked, what is believed, and how it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mtp_train.serving.job import DraftCounts, ServingError, ServingJob, vllm_layout
from mtp_train.serving.process import find_python, job_content, read_result, serve_in_process

FAKE = Path(__file__).with_name("fake_vllm")


def make_python(path: Path, *, plays: str) -> Path:
    """An interpreter in whose environment the fake vLLM is installed."""
    script = path / "python"
    setting = f"PYTHONPATH={FAKE} FAKE_VLLM={plays} " if plays else "PYTHONPATH= "
    script.write_text(f'#!/bin/sh\n{setting}exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script


def make_job(path: Path, *, k: int = 2) -> ServingJob:
    return ServingJob(
        target=path / "target",
        head=path / "head",
        k=k,
        dtype="float32",
        groups=(((3, 4, 5, 6), (7, 8)), ((9,),)),
        max_tokens=10,
        stop_token_ids=(2,),
    )


def serve(path: Path, plays: str, **arguments: object):  # type: ignore[no-untyped-def]
    return serve_in_process(
        make_job(path),
        python=make_python(path, plays=plays),
        layout=vllm_layout("mimo"),
        **arguments,  # type: ignore[arg-type]
    )


def test_steps_come_back_per_prompt_and_warm_up_is_not_counted(tmp_path: Path) -> None:
    served = serve(tmp_path, "new")
    assert served.version == "0.32.0"
    assert served.attribution == "request"
    assert [prompt.accepted_per_step for prompt in served.prompts] == [(0, 1, 2, 0), (0, 1), (0,)]
    assert served.prompts[0].output_ids == (3, 4, 5, 6, 2)
    assert served.counters == served.attributed == DraftCounts(7, (3, 1))
    assert served.warm_up == DraftCounts(5, (2, 0))
    assert served.clipped_steps == 0


def test_an_engine_that_only_counts_serves_one_prompt_at_a_time(tmp_path: Path) -> None:
    served = serve(tmp_path, "old")
    assert served.attribution == "one_at_a_time"
    assert [prompt.accepted_per_step for prompt in served.prompts] == [None, None, None]
    assert [prompt.counts for prompt in served.prompts] == [
        DraftCounts(4, (2, 1)),
        DraftCounts(2, (1, 0)),
        DraftCounts(1, (0, 0)),
    ]
    assert served.counters == DraftCounts(7, (3, 1))


@pytest.mark.parametrize(
    ("plays", "stage", "words"),
    [
        ("", "import", "cannot import vllm"),
        ("ancient", "import", "vLLM 0.9.2: at least 0.10 is needed"),
        ("refuses", "load", "ValueError: There is no module or parameter named 'extra'"),
        ("dies", "load", "Illegal instruction, says the engine"),
        ("forgets", "decode", "1 answers came back for 3 prompts"),
    ],
)
def test_a_failure_is_told_in_the_engines_own_words(
    tmp_path: Path, plays: str, stage: str, words: str
) -> None:
    with pytest.raises(ServingError, match=words.replace("(", r"\(")) as caught:
        serve(tmp_path, plays)
    assert caught.value.stage == stage


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"not done after engine.timeout_s=1"):
        serve(tmp_path, "hangs", timeout_s=1.0)


def test_what_the_engine_printed_can_be_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    with pytest.raises(ServingError):
        serve(tmp_path, "dies", log_file=log)
    assert "Illegal instruction" in log.read_text()


def test_the_job_leaves_room_for_three_more_steps_and_prefills_a_group_at_once(
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path, k=3)
    content = job_content(job, vllm_layout("mimo"), {"tensor_parallel_size": 2})
    assert content["max_model_len"] == 4 + 10 + 3 * (3 + 1)
    assert content["max_num_seqs"] == 2
    assert content["max_num_batched_tokens"] >= 7
    assert content["hf_overrides"] == {"num_nextn_predict_layers": 1}
    assert content["llm_args"] == {"tensor_parallel_size": 2}


def test_a_clipped_draft_is_counted(tmp_path: Path) -> None:
    record = {
        "output_ids": [1, 2],
        "finish_reason": "length",
        "accepted_per_step": [1],
        "drafted_per_step": [1],
    }
    counts = {"drafts": 3, "accepted": [3, 0]}
    raw = {
        "version": "1",
        "attribution": "request",
        "warm_up": counts,
        "counters": counts,
        "prompts": [record] * 3,
        "load_s": 1,
        "decode_s": 1,
    }
    assert read_result(raw, make_job(tmp_path)).clipped_steps == 3


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ServingError, match=r"engine.python=/nowhere/python: no such interpreter"):
        find_python("/nowhere/python")


def test_a_virtual_environments_interpreter_is_not_resolved_to_the_one_it_links_to(
    tmp_path: Path,
) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_python(str(link)) == link


def test_another_export_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"export.format='eagle_sglang'"):
        vllm_layout("eagle_sglang")

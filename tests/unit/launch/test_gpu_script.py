"""`tests/gpu/run.sh` and what it calls, as far as they go without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.spec import mtp
from runtime.verify import Verified
from tests.gpu.figures import ROW_NAMES, ROWS, main, simulated_acceptance
from tests.gpu.models import SHAPES
from tests.gpu.summary import describe_figures, read_checks, read_figures, verdict
from tests.gpu.summary import main as summarise
from tests.unit.runtime.flashinfer_cases import make_backend
from tests.unit.runtime.flashinfer_signatures import recorded_versions
from tests.unit.runtime.operator_recorder import OperatorRecorder

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
BASH = shutil.which("bash")
JUNIT = """<testsuites><testsuite>
<testcase name="test_equals_sdpa[tree_rows]" time="1.5"/>
<testcase name="test_xqa" time="0.1"><skipped message="no"/></testcase>
{}</testsuite></testsuites>"""
FAILED = '<testcase name="test_bad" time="2"><failure message="off by 3&#10;more"/></testcase>'

needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not installed")


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    assert BASH is not None
    own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [BASH, str(SCRIPT), *arguments],
        env={**own, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_bash
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what"], "unknown argument --what"),
        (["--out"], "--out needs a value"),
        (["--seconds", "soon"], "--seconds soon: not a number"),
        (["--wheels", "/no/such"], "--wheels /no/such: no such folder"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str) -> None:
    done = run_script(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@needs_bash
def test_help_lists_every_argument() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    known = set(re.findall(r"^    (--[a-z]+)\)", SCRIPT.read_text(), flags=re.M))
    assert known == {"--out", "--wheels", "--seconds", "--only", "--rehearse"}
    assert known <= set(done.stdout.split())


@needs_bash
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = run_script("--out", str(tmp_path))
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@needs_bash
@pytest.mark.slow
def test_the_rehearsal_writes_every_row(tmp_path: Path) -> None:
    done = run_script("--rehearse", "--seconds", "3000", OUT=str(tmp_path / "new"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("all is well")
    rows = read_figures(tmp_path / "new" / "figures.jsonl")
    assert tuple(dict.fromkeys(row["name"] for row in rows)) == ROW_NAMES
    assert not any("failed" in row for row in rows)
    assert (tmp_path / "new" / "summary.txt").read_text() in done.stdout
    checks = read_checks(tmp_path / "new" / "checks.xml")
    assert checks
    names = {check.name.split("[")[0] for check in checks}
    assert {"test_equals_sdpa", "test_a_step_never_synchronises", "test_xqa_needs_no_plan"} <= names


@needs_bash
def test_carried_wheels_are_installed_for_this_run_alone(tmp_path: Path) -> None:
    wheels, seen = tmp_path / "wheels", tmp_path / "seen"
    wheels.mkdir()
    (wheels / "some-1-py3-none-any.whl").touch()
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@ [$PYTHONPATH]" >>{seen}\n')
    fake.chmod(0o755)
    run_script("--rehearse", "--wheels", str(wheels), "--out", str(tmp_path), PYTHON=str(fake))
    install, *later = seen.read_text().splitlines()
    target = re.search(r"-m pip install .*--no-index .*--target (\S+) \S*some-1", install)
    assert target is not None, install
    assert later
    assert all(f":{target.group(1)}]" in line for line in later)


def test_only_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    arguments = ["--device", "cpu", "--shape", "tiny", "--out", str(out)]
    assert main([*arguments, "--only", "decode", "--only", "mtp1"]) == 0
    rows = read_figures(out)
    assert [row["name"] for row in rows] == ["decode", "decode", "mtp1", "mtp1"]
    decode, mtp_row = rows[1], rows[3]
    assert decode["batch"] == 2
    assert decode["emitted_per_step"] == 1.0
    assert decode["gb_s"] == pytest.approx(
        (2 * SHAPES["tiny"].num_matrix_weights + SHAPES["tiny"].kv_bytes(2 * 18))
        / (decode["step_ms"] * 1e6)
    )
    assert 1.0 <= mtp_row["emitted_per_step"] <= 2.0
    assert mtp_row["itl_ms"] == pytest.approx(mtp_row["step_ms"] / mtp_row["emitted_per_step"])
    assert main([*arguments, "--seconds", "-1"]) == 0
    assert {row.get("skipped") for row in read_figures(out)} == {"no time left"}


def test_rows_with_graphs_through_the_emulators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[OperatorRecorder] = []

    def recorder() -> OperatorRecorder:
        recorders.append(OperatorRecorder())
        return recorders[-1]

    monkeypatch.setattr("runtime.spec.runners.CudaRecorder", recorder)
    monkeypatch.setattr(
        "tests.gpu.models.backend_for", lambda *facts: make_backend(recorded_versions()[-1])
    )
    out = tmp_path / "x.jsonl"
    arguments = ["--device", "cpu", "--shape", "tiny", "--out", str(out)]
    assert main([*arguments, "--only", "decode_graphs", "--only", "mtp3_graphs"]) == 0
    rows = read_figures(out)
    assert [row["name"] for row in rows] == ["decode_graphs"] * 2 + ["mtp3_graphs"] * 2
    assert all(recorder.num_replays > 0 for recorder in recorders)


def test_a_row_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rig: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(ROWS, "dump", broken)
    out = tmp_path / "x.jsonl"
    arguments = ["--device", "cpu", "--shape", "tiny", "--out", str(out)]
    assert main([*arguments, "--only", "dump", "--only", "draft_target"]) == 1
    rows = read_figures(out)
    assert rows[0] == {"name": "dump", "failed": "RuntimeError: CUDA out of memory"}
    assert rows[1]["name"] == "draft_target"


def test_sizes_of_the_8b_shape() -> None:
    shape = SHAPES["8b"]
    assert shape.num_matrix_weights == 7_504_658_432  # and an embedding of 0.5 billion
    assert shape.kv_bytes(1) == 131_072


def test_simulated_acceptance_makes_whole_steps() -> None:
    logits = torch.randn(64, 4, 9)
    drafts = torch.randint(0, 9, (64, 3))

    def verify(rate: float) -> Verified:
        with simulated_acceptance(rate, "runtime.spec.mtp"):
            return mtp.verify_chain(  # type: ignore[attr-defined]
                "keyed",
                logits,
                drafts,
                mtp.SamplingTensors.build([_greedy()] * 64, torch.device("cpu")),  # type: ignore[attr-defined]
                torch.arange(64),
                draft_probs_BKV=None,
            )

    original = mtp.verify_chain  # type: ignore[attr-defined]
    all_right, never, often = verify(1.0), verify(0.0), verify(0.8)
    assert mtp.verify_chain is original  # type: ignore[attr-defined]
    assert (all_right.num_emitted_B == 4).all()
    assert torch.equal(all_right.ids_BK1[:, :3], drafts)
    assert (never.num_emitted_B == 1).all()
    assert torch.equal(never.last_ids_B, logits[:, 0].argmax(-1))
    expected = 1 + 0.8 + 0.8**2 + 0.8**3
    assert often.num_emitted_B.float().mean() == pytest.approx(expected, abs=0.4)
    count = often.num_emitted_B[:, None]
    assert torch.equal((often.ids_BK1 >= 0).sum(1, keepdim=True), count)
    assert torch.equal(often.ids_BK1.gather(1, count - 1)[:, 0], often.last_ids_B)


def _greedy() -> Any:
    from runtime.request import SamplingParams

    return SamplingParams()


@pytest.mark.parametrize(
    ("junit", "figures", "wrong"),
    [
        (JUNIT.format(""), '{"name": "dump", "mfu": 0.5}\n', ""),
        (JUNIT.format(FAILED), '{"name": "dump"}\n', "1 checks failed: test_bad"),
        (JUNIT.format(""), "", "no figure was measured"),
        (JUNIT.format(""), '{"name": "dump", "failed": "x"}\n', "figures failed: dump"),
        ("<testsuites><tests", '{"name": "dump"}\n', "the checks did not finish"),
        (None, '{"name": "dump"}\n', "the checks did not finish"),
        ("<testsuites/>", '{"name": "dump"}\n', "no check ran"),
    ],
)
def test_the_verdict(
    junit: str | None, figures: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if junit is not None:
        (tmp_path / "checks.xml").write_text(junit)
    (tmp_path / "figures.jsonl").write_text(figures)
    assert summarise([str(tmp_path)]) == int(bool(wrong))
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == (f"NOT WELL: {wrong}" if wrong else "all is well")


def test_a_run_that_was_cut_off_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    file.write_text(json.dumps({"name": "dump", "seconds": 1, "mfu": 0.41234}) + '\n{"name": "de')
    rows = read_figures(file)
    assert describe_figures(rows) == ["dump           mfu=0.4123"]
    assert describe_figures([{"name": "mtp1", "skipped": "no time left"}]) == [
        "mtp1           skipped: no time left"
    ]
    assert read_figures(tmp_path / "none.jsonl") == []
    assert verdict(None, rows, figures_only=True) == ""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

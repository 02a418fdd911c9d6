"""The whole line on a tiny random target, once; then each hop broken in turn and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train import stages
from mtp_train.config import Config
from mtp_train.export import reader
from mtp_train.export.layouts import mimo
from mtp_train.preflight import flight, stage
from mtp_train.preflight.acceptance import DecodedText, count_learnt, shared_prefix
from mtp_train.preflight.hops import Hop, Judgement, run_hops
from mtp_train.preflight.plan import preflight_config, training_config
from mtp_train.run_dir import RunDirectory, read_json, write_json_atomic
from mtp_train.serving.job import DraftCounts, Served, ServedPrompt, ServingJob
from mtp_train.settings import load_config
from mtp_train.validate import subject as subject_module
from mtp_train.validate.served import decode_ours
from mtp_train.validate.subject import Subject
from runtime.head_spec import HeadSpec, load_head
from tests.unit.cli.byte_target import save_byte_target
from tests.unit.export.tampers import TAMPERS
from tests.unit.runtime.model_fixtures import kernel_cache

NUM_PROMPTS = 6


def make_config(root: Path, **changes: Any) -> Config:
    source = root / "prompts.jsonl"
    if not source.exists():
        lines = [json.dumps({"prompt": f"{number} {number * 7}"}) for number in range(40)]
        source.write_text("\n".join(lines) + "\n")
    raw: dict[str, Any] = {
        "run": {"name": "tiny", "root": str(root / "runs")},
        "target": {
            "path": str(root / "target"),
            "dtype": "float32",
            "device": "cpu",
            "cache_dir": str(kernel_cache()),
        },
        "data": {"sources": [str(source)], "max_tokens": 128},
        "features": {"codec": "fp32", "p0_rows_per_sample": 3},
        "runtime": {"num_threads": 1, "max_model_len": 256, "num_pages": 256},
        "trainer": {"dtype": "float32"},
        "preflight": {
            "num_prompts": NUM_PROMPTS,
            "max_tokens": 10,
            "steps": 150,
            "learning_rate": 0.01,
        },
        "head": {"init": "last_layer"},
    }
    for path, value in changes.items():
        section, _, name = path.partition("__")
        raw.setdefault(section, {})[name] = value
    return load_config(raw)


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preflight that has come through; tests run it again with one thing broken."""
    root = tmp_path_factory.mktemp("preflight")
    save_byte_target(root / "target")
    assert stage.run(make_config(root)) == 0
    return root


def fly(config: Config) -> dict[str, dict[str, Any]]:
    """Run it; results by hop."""
    code = stage.run(config)
    content = read_json(RunDirectory.from_config(config).preflight_file)
    assert content["passed"] == (code == 0)
    return {hop["name"]: hop for hop in content["hops"]}


def expect_failure(hops: dict[str, dict[str, Any]], name: str, text: str) -> None:
    verdicts = [hop["verdict"] for hop in hops.values()]
    at = list(hops).index(name)
    assert verdicts == ["passed"] * at + ["FAILED"] + ["not run"] * (len(hops) - at - 1), hops
    assert text in hops[name]["note"]


def test_every_hop_passes_and_what_is_there_is_not_made_again(
    flown: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = flown / "runs" / "tiny" / "preflight"
    made = [root / "head" / "model.safetensors", root / "export" / "mimo" / "model.safetensors"]
    before = [file.stat().st_mtime_ns for file in made]
    hops = fly(make_config(flown))
    assert [hop["verdict"] for hop in hops.values()] == ["passed"] * len(hops)
    assert hops["data"]["figures"]["prompts"] == NUM_PROMPTS
    assert hops["features"]["figures"]["max_gap"] <= 1e-4
    assert hops["training"]["figures"]["accuracy"] >= 0.9
    for name in ("runtime", "exported head"):
        assert hops[name]["figures"]["rates"][0] >= 0.9
        assert hops[name]["figures"]["agreement"] == 1.0
    assert hops["runtime"]["figures"] == hops["exported head"]["figures"]
    assert [file.stat().st_mtime_ns for file in made] == before
    assert "your engine was not asked" in capsys.readouterr().out


def test_a_head_that_others_wrote_starts_the_training(
    flown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mimo"
    shutil.copytree(flown / "runs" / "tiny" / "preflight" / "export" / "mimo", out)
    (out / "export.json").unlink()
    seen: list[Config] = []
    monkeypatch.setattr(stage, "run", lambda config: seen.append(config) or 0)
    config = make_config(flown, head__init=str(out), run__root=str(tmp_path / "runs"))
    assert stages.run_preflight(config) == 0
    init = Path(seen[0].head.init)
    assert tmp_path / "runs" / "tiny" / "imported" == init.parent
    spec, wanted = load_head(flown / "runs" / "tiny" / "preflight" / "head")
    own, tensors = load_head(init)
    halves_DD = wanted["eh_proj.weight"].chunk(2, 1)
    assert (spec.concat, own.concat) == ("embedding_hidden", "hidden_embedding")
    assert torch.equal(tensors["eh_proj.weight"], torch.cat(halves_DD[::-1], 1))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted if "norm" in name)


def after_export(change: Callable[[Path], None]) -> Callable[[Config], int]:
    """The export stage, and then something happens to the directory."""
    export = stages.run_export

    def run(config: Config) -> int:
        code = export(config)
        change(RunDirectory.from_config(config).export("mimo"))
        return code

    return run


def change_recycle(directory: Path) -> None:
    record = read_json(directory / "export.json")
    record["head"]["recycle"] = "pre_norm"
    write_json_atomic(directory / "export.json", record)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (TAMPERS["theta"].apply, "rope_theta="),
        (TAMPERS["swapped_concatenation"].apply, "input_proj.weight has its column halves"),
        (change_recycle, 'recycle="pre_norm"'),
    ],
)
def test_a_damaged_export_fails_its_own_hop(
    change: Callable[[Path], None], named: str, flown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "run_export", after_export(change))
    expect_failure(fly(make_config(flown)), "export", named)


def test_an_exporter_that_forgets_the_order_fails_the_export_hop(
    flown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mimo, "swap_halves", lambda weight: weight)
    (flown / "runs" / "tiny" / "preflight" / "export" / "mimo.json").unlink()
    expect_failure(fly(make_config(flown)), "export", "differ from the native head")


def test_a_loader_that_reads_the_order_wrong_fails_the_exported_head_hop(
    flown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is right, and was found right before; what loads it is not."""
    read = reader.read_export

    def read_swapped(directory: Path) -> tuple[HeadSpec, dict[str, torch.Tensor]]:
        spec, tensors = read(directory)
        return replace(spec, concat="embedding_hidden"), tensors

    fly(make_config(flown))  # writes the export again where a test before this one removed it
    monkeypatch.setattr(reader, "read_export", read_swapped)
    expect_failure(fly(make_config(flown)), "exported head", "learnt by heart is not drafted")


@pytest.mark.parametrize(
    "spec", [{"norm_form": "1+w"}, {"concat": "hidden_embedding"}, {"norm_eps": 10.0}]
)
def test_a_runtime_that_computes_another_head_fails_the_runtime_hop(
    spec: dict[str, Any], flown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = subject_module.build_head

    def build_wrong(own: HeadSpec, *arguments: Any) -> Any:
        return build(replace(own, **spec), *arguments)

    monkeypatch.setattr(subject_module, "build_head", build_wrong)
    expect_failure(fly(make_config(flown)), "runtime", "is not drafted in the runtime")


def test_another_text_than_the_answers_is_not_taken_for_them(
    flown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_of = flight.answer_of
    monkeypatch.setattr(flight, "answer_of", lambda row: answer_of(row)[::-1])
    expect_failure(fly(make_config(flown)), "runtime", "leaves the target's answers")


@pytest.mark.parametrize(
    ("changes", "hop", "named"),
    [
        ({"head__recycle": "pre_norm"}, "head", 'recycle="pre_norm"'),
        ({"run__name": "eagle3"}, "head", "choose another run.name"),
        ({"data__sources": ["nowhere.jsonl"]}, "data", "nowhere.jsonl"),
        ({"preflight__num_prompts": 2000}, "data", "preflight.max_prompt_tokens"),
        ({"features__p0_max_logprob_gap": 1e-12}, "features", "p0_max_logprob_gap"),
        ({"preflight__steps": 2}, "training", "preflight."),
    ],
)
def test_the_hop_that_is_wrong_is_named(
    changes: dict[str, Any], hop: str, named: str, flown: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(flown / "target")
    changes = {"preflight__max_tokens": 4, **changes}
    expect_failure(fly(make_config(tmp_path, **changes)), hop, named)


def engine_like(change: Callable[[ServedPrompt], ServedPrompt]) -> Callable[[Config], Any]:
    """An ``open_engine`` whose engine is the runtime, with every answer changed."""

    def open_engine(config: Config) -> Callable[[ServingJob], Served]:
        def serve(job: ServingJob) -> Served:
            subject = Subject(job.target, job.head, torch.float32, config.runtime)
            generations = decode_ours(
                subject,
                job.prompts,
                k=job.k,
                dtype=torch.float32,
                max_tokens=job.max_tokens,
                max_running=len(job.groups[0]),
            )
            prompts = []
            for generation in generations:
                steps = tuple(step.num_accepted for step in generation.steps)
                counts = DraftCounts.of_steps(steps, job.k)
                prompts.append(change(ServedPrompt(generation.output_ids, "length", counts, steps)))
            none = DraftCounts.none(job.k)
            return Served(
                "fake", "1.0", job.k, job.dtype, tuple(prompts), none, none, "one_at_a_time"
            )

        return serve

    return open_engine


def accepts_nothing(prompt: ServedPrompt) -> ServedPrompt:
    steps = (0,) * (len(prompt.output_ids) - 1)
    return replace(prompt, accepted_per_step=steps)


def only_counts(prompt: ServedPrompt) -> ServedPrompt:
    return replace(prompt, accepted_per_step=None)


def says_something_else(prompt: ServedPrompt) -> ServedPrompt:
    return replace(prompt, output_ids=tuple(token + 1 for token in prompt.output_ids))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda prompt: prompt, ""),
        (only_counts, ""),
        (accepts_nothing, "is not drafted in fake 1.0"),
        (says_something_else, "the text decoded in fake 1.0 leaves the target's answers"),
    ],
)
def test_the_engine_is_the_last_hop(
    change: Callable[[ServedPrompt], ServedPrompt],
    named: str,
    flown: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And asking one does not make anything again."""
    made = flown / "runs" / "tiny" / "preflight" / "head" / "model.safetensors"
    before = made.stat().st_mtime_ns
    monkeypatch.setattr(stage, "open_engine", engine_like(change))
    hops = fly(make_config(flown, engine__kind="vllm", engine__python="python"))
    if named:
        expect_failure(hops, "engine", named)
    else:
        assert hops["engine"]["verdict"] == "passed"
        assert hops["engine"]["figures"] == hops["exported head"]["figures"]
    assert made.stat().st_mtime_ns == before


def test_an_engine_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path, engine__kind="vllm", engine__python="/nowhere/python")
    with pytest.raises(ValueError, match="no such interpreter"):
        stage.run(config)
    assert not (tmp_path / "runs").exists()


def test_other_settings_start_over(flown: Path, tmp_path: Path) -> None:
    (tmp_path / "target").symlink_to(flown / "target")
    short = {"preflight__max_tokens": 4, "preflight__steps": 2}
    fly(make_config(tmp_path, **short))
    old = tmp_path / "runs" / "tiny" / "preflight" / "old"
    old.touch()
    fly(make_config(tmp_path, **short))
    assert old.exists()
    hops = fly(make_config(tmp_path, **short | {"preflight__max_tokens": 5}))
    assert not old.exists()
    assert hops["data"]["figures"]["answer_tokens"] <= 5 * NUM_PROMPTS


def test_the_plan_keeps_what_decides_whether_the_line_is_right(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        head__concat="hidden_embedding",
        data__chat_template_kwargs={"thinking": "false"},
        data__max_prompt_tokens=100,
        features__codec="fp8_e4m3",
    )
    small = preflight_config(config)
    for name in ("target", "head", "features", "seed"):
        assert getattr(small, name) == getattr(config, name)
    assert small.data.chat_template_kwargs == config.data.chat_template_kwargs
    assert (small.data.max_prompt_tokens, small.data.max_turns) == (100, 1)
    assert RunDirectory.from_config(small).root == tmp_path / "runs" / "tiny" / "preflight"
    trained = training_config(small, num_tokens=9000)
    assert (trained.trainer.tokens_per_step, trained.trainer.gradient_accumulation) == (4500, 2)


def test_steps_count_as_long_as_the_text_is_the_answer() -> None:
    answer = [1, 2, 3, 4, 5, 6, 7, 8]
    same = DecodedText(answer, answer, [2, 0, 1])  # tokens 1..3, 4, 5..6
    counts = count_learnt([same], k=3)
    assert (counts.steps, counts.accepted, counts.agreement) == (3, (2, 1, 0), 1.0)
    parted = DecodedText(answer, [1, 2, 3, 4, 9, 9, 9, 9], [2, 0, 1])
    counts = count_learnt([parted], k=3)
    assert (counts.steps, counts.accepted) == (1, (1, 1, 0))
    assert (counts.agreed, counts.answered) == (4, 8)
    assert count_learnt([], k=2).rates == (0.0, 0.0)
    assert shared_prefix([1, 2], [1, 2, 3]) == 2


def test_faults_of_ours_are_raised_and_refusals_are_verdicts() -> None:
    seen: list[str] = []

    def hop(name: str, judge: Callable[[], Judgement]) -> Hop:
        return Hop(name, "?", judge)

    def refuse() -> Judgement:
        raise ValueError("data.sources: nothing there")

    def crash() -> Judgement:
        raise KeyError("bug")

    fine = hop("fine", lambda: Judgement(True, "1.0"))
    results = run_hops(
        [fine, hop("bad", refuse), fine], announce=lambda number, hop: seen.append(hop.name)
    )
    assert [result.verdict for result in results] == ["passed", "FAILED", "not run"]
    assert results[1].note == "data.sources: nothing there"
    assert seen == ["fine", "bad"]
    with pytest.raises(KeyError):
        run_hops([hop("broken", crash)], announce=lambda number, hop: None)

"""P6 with an engine that is our own runtime: what it calls equal, and every mutant it must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.config import DataConfig
from mtp_train.config import Config, RunConfig, ServingConfig, TargetConfig, ValidateConfig
from mtp_train.export import write_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.export.weights import hash_files
from mtp_train.run_dir import RunDirectory, read_json, write_json_atomic
from mtp_train.serving.job import DraftCounts, Served, ServedPrompt, ServingJob
from mtp_train.stages import run_validate
from mtp_train.validate import engine_rung, p6
from mtp_train.validate.output import add_rung, stored_rung
from mtp_train.validate.report import RungResult
from mtp_train.validate.served import (
    EnginePair,
    compare_prompt,
    decode_ours,
    divergences,
    first_difference,
    serve_and_compare,
)
from mtp_train.validate.subject import Subject
from runtime.head_spec import load_head, save_head
from runtime.request import Generation, SpecStep
from tests.unit.validate.subjects import RUNTIME, make_prompts, make_subject

CPU = torch.device("cpu")
Change = Callable[[ServedPrompt], ServedPrompt]


def as_engine(subject: Subject, dtype: torch.dtype, *, tells_steps: bool = True) -> Any:
    """An engine that computes what ``subject`` does."""

    def serve(job: ServingJob) -> Served:
        generations = decode_ours(
            subject,
            job.prompts,
            k=job.k,
            dtype=dtype,
            max_tokens=job.max_tokens,
            max_running=len(job.groups[0]),
        )
        prompts = []
        for generation in generations:
            accepted = tuple(step.num_accepted for step in generation.steps)
            counts = DraftCounts.of_steps(accepted, job.k)
            steps = accepted if tells_steps else None
            prompts.append(ServedPrompt(generation.output_ids, "length", counts, steps))
        total = sum((prompt.counts for prompt in prompts), DraftCounts.none(job.k))
        none = DraftCounts.none(job.k)
        return Served("fake", "1", job.k, job.dtype, tuple(prompts), total, none, "request")

    return serve


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("p6")
    make_subject(path)
    return path


def subject_at(place: Path, dtype: torch.dtype = torch.float32, head: str = "head") -> Subject:
    return Subject(place / "target", place / head, dtype, RUNTIME)


def make_pair(place: Path, *, dtype: torch.dtype = torch.float32, **engine: Any) -> EnginePair:
    subject = subject_at(place, dtype)
    serve = engine.pop("serve", None) or as_engine(subject_at(place, dtype), dtype, **engine)
    return serve_and_compare(
        subject, make_prompts(), k=2, dtype=dtype, max_tokens=24, serve=serve, max_running=4
    )


def check(place: Path, pair: EnginePair, *, min_drafts: int = 20) -> RungResult:
    run = p6.EngineRun(pair, ("a", "b") * (len(pair.generations) // 2))
    return p6.check(subject_at(place, pair.dtype), [run], min_drafts=min_drafts)


def change_first(pair: EnginePair, change: Change) -> EnginePair:
    """``pair`` with one answer of the engine changed; its totals follow."""
    prompts = (change(pair.served.prompts[0]), *pair.served.prompts[1:])
    total = sum((prompt.counts for prompt in prompts), DraftCounts.none(pair.k))
    return replace(pair, served=replace(pair.served, prompts=prompts, counters=total))


def with_steps(prompt: ServedPrompt, steps: tuple[int, ...]) -> ServedPrompt:
    return replace(prompt, accepted_per_step=steps, counts=DraftCounts.of_steps(steps, 2))


def other_token(prompt: ServedPrompt, at: int) -> ServedPrompt:
    ids = list(prompt.output_ids)
    ids[at] = (ids[at] + 1) % 11
    return replace(prompt, output_ids=tuple(ids))


# -- fp32 -----------------------------------------------------------------------------------------


def test_an_engine_that_computes_the_same_passes_in_fp32(place: Path) -> None:
    result = check(place, make_pair(place))
    figures = result.figures
    assert result.passed
    assert figures["float32_k2_steps_that_differ"] == 0
    assert figures["float32_k2_drafts"] == figures["float32_k2_drafts_served"] > 0
    assert figures["float32_k2_accepted"] == figures["float32_k2_accepted_served"]
    assert figures["float32_k2_accepted"][0] > 0
    assert figures["engine"] == "fake 1"
    assert [row["set"] for row in figures["sets"]] == ["a", "b"]
    drafts = [row["drafts"] for row in figures["sets"]]
    assert sum(drafts) == figures["float32_k2_drafts"]


def test_an_engine_that_only_counts_passes_in_fp32(place: Path) -> None:
    assert check(place, make_pair(place, tells_steps=False)).passed


@pytest.mark.parametrize(
    "change",
    [
        lambda p: with_steps(p, p.accepted_per_step[:-1]),
        lambda p: with_steps(p, (*p.accepted_per_step, 0)),
        lambda p: with_steps(p, (2 - p.accepted_per_step[0], *p.accepted_per_step[1:])),
        lambda p: with_steps(p, (1, *p.accepted_per_step[1:])),
    ],
    ids=["one draft less", "one draft more", "other acceptance", "one accepted more or less"],
)
def test_one_step_off_fails_in_fp32(place: Path, change: Change) -> None:
    pair = make_pair(place)
    changed = change_first(pair, change)
    if changed.served.prompts[0] == pair.served.prompts[0]:
        pytest.fail("the mutant changed nothing")
    result = check(place, changed)
    assert not result.passed
    assert result.figures["float32_k2_steps_that_differ"] > 0


@pytest.mark.parametrize("amount", [1, -1])
def test_counts_that_are_off_fail_where_the_engine_only_counts(place: Path, amount: int) -> None:
    def change(prompt: ServedPrompt) -> ServedPrompt:
        counts = prompt.counts
        return replace(prompt, counts=replace(counts, drafts=counts.drafts + amount))

    assert not check(place, change_first(make_pair(place, tells_steps=False), change)).passed


@pytest.mark.parametrize("at", [0, 7])
def test_another_text_fails_in_fp32(place: Path, at: int) -> None:
    result = check(place, change_first(make_pair(place), lambda p: other_token(p, at)))
    assert not result.passed
    assert result.figures["float32_k2_texts_that_part"] == 1
    assert result.figures["float32_k2_steps_that_differ"] == 0  # before that token all is equal


def test_a_text_that_ends_early_fails_in_fp32(place: Path) -> None:
    pair = change_first(make_pair(place), lambda p: replace(p, output_ids=p.output_ids[:-3]))
    assert not check(place, pair).passed


def test_totals_that_contradict_the_prompts_fail(place: Path) -> None:
    pair = make_pair(place)
    counters = replace(pair.served.counters, drafts=pair.served.counters.drafts + 1)
    result = check(place, replace(pair, served=replace(pair.served, counters=counters)))
    assert not result.passed
    assert result.figures["float32_k2_counters_that_differ"] == 1


def test_a_clipped_step_fails(place: Path) -> None:
    pair = make_pair(place)
    assert not check(place, replace(pair, served=replace(pair.served, clipped_steps=1))).passed


def test_equal_counts_of_nothing_are_no_pass(place: Path) -> None:
    pair = make_pair(place)
    pair = replace(
        pair,
        generations=tuple(
            replace(g, steps=tuple(replace(s, num_accepted=0) for s in g.steps))
            for g in pair.generations
        ),
    )
    prompts = tuple(with_steps(p, (0,) * len(p.accepted_per_step)) for p in pair.served.prompts)
    total = sum((prompt.counts for prompt in prompts), DraftCounts.none(2))
    pair = replace(pair, served=replace(pair.served, prompts=prompts, counters=total))
    assert not check(place, pair).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_its_projection_swapped_in_the_engine_fails(
    place: Path, dtype: torch.dtype
) -> None:
    spec, tensors = load_head(place / "head")
    left, right = tensors["eh_proj.weight"].chunk(2, dim=1)
    save_head(place / "swapped", spec, {**tensors, "eh_proj.weight": torch.cat((right, left), 1)})
    engine = as_engine(subject_at(place, dtype, "swapped"), dtype)
    result = check(place, make_pair(place, dtype=dtype, serve=engine))
    assert not result.passed
    if dtype is torch.float32:  # the text is the target's: only the counts can tell
        assert result.figures["float32_k2_texts_that_part"] == 0
        assert result.figures["float32_k2_steps_that_differ"] > 0


def test_no_run_at_all_is_no_pass(place: Path) -> None:
    assert not p6.check(subject_at(place), [], min_drafts=1).passed


# -- bf16 -----------------------------------------------------------------------------------------


def test_an_engine_that_computes_the_same_passes_in_bf16(place: Path) -> None:
    result = check(place, make_pair(place, dtype=torch.bfloat16))
    assert result.passed
    assert result.figures["bfloat16_k2_gap"] == [0.0, 0.0]
    assert result.figures["bfloat16_k2_texts_that_part"] == 0


def test_too_few_drafts_are_no_pass_in_bf16(place: Path) -> None:
    pair = make_pair(place, dtype=torch.bfloat16)
    assert not check(place, pair, min_drafts=10_000).passed


def test_rates_that_differ_fail_in_bf16(place: Path) -> None:
    """Every answer claims to have accepted the first draft of every step."""
    pair = make_pair(place, dtype=torch.bfloat16)
    prompts = tuple(
        with_steps(p, tuple(max(1, count) for count in p.accepted_per_step))
        for p in pair.served.prompts
    )
    total = sum((prompt.counts for prompt in prompts), DraftCounts.none(2))
    changed = replace(pair, served=replace(pair.served, prompts=prompts, counters=total))
    assert not check(place, changed).passed


def test_a_text_that_parts_away_from_a_tie_fails_in_bf16(place: Path) -> None:
    pair = make_pair(place, dtype=torch.bfloat16)
    worst = min(range(11), key=lambda token: _gap_of(place, pair, token))
    assert _gap_of(place, pair, worst) >= 0
    changed = change_first(pair, lambda p: replace(p, output_ids=(_far(place, pair),)))
    result = check(place, changed)
    assert not result.passed
    assert result.figures["bfloat16_k2_part_ulp"] > p6.MAX_ULP


def test_a_tie_in_our_own_logits_is_no_difference(place: Path) -> None:
    """The gap is that of the two tokens, in our logits, where the texts part."""
    pair = make_pair(place, dtype=torch.bfloat16)
    changed = change_first(pair, lambda p: other_token(p, 3))
    (found,) = divergences(subject_at(place, torch.bfloat16), changed)
    assert (found.prompt, found.index) == (0, 3)
    assert found.gap >= 0
    assert divergences(subject_at(place, torch.bfloat16), pair) == []


def _gap_of(place: Path, pair: EnginePair, token: int) -> float:
    changed = change_first(pair, lambda p: replace(p, output_ids=(token,)))
    found = divergences(subject_at(place, pair.dtype), changed)
    return found[0].gap if found and found[0].gap != float("inf") else 0.0


def _far(place: Path, pair: EnginePair) -> int:
    """The first token that our logits think least of."""
    return max(range(11), key=lambda token: _gap_of(place, pair, token))


# -- comparison -----------------------------------------------------------------------------------


def make_generation(output: tuple[int, ...], steps: tuple[tuple[int, int], ...]) -> Generation:
    """``steps``: start and number accepted."""
    return Generation(
        "x", (1, 2), output, "length", tuple(SpecStep((0, 0), count, at) for at, count in steps)
    )


def test_steps_are_compared_until_the_texts_part_and_no_further() -> None:
    ours = make_generation((5, 6, 7, 8, 9, 3), ((1, 1), (3, 0), (4, 1)))
    served = ServedPrompt((5, 6, 7, 8, 4, 4), "length", DraftCounts(3, (3, 2)), (1, 0, 2))
    compared = compare_prompt(ours, served, 2)
    assert compared.divergence == 4
    assert compared.num_wrong == 0
    assert compared.ours == compared.theirs == DraftCounts(2, (1, 0))


def test_a_step_that_reaches_past_the_difference_is_left_out() -> None:
    ours = make_generation((5, 6, 7, 8), ((1, 2),))
    served = ServedPrompt((5, 6, 9, 9), "length", DraftCounts(2, (0, 0)), (0, 0))
    compared = compare_prompt(ours, served, 2)
    assert (compared.num_wrong, compared.ours.drafts) == (0, 0)


def test_a_prompt_that_parts_cannot_be_compared_by_totals() -> None:
    ours = make_generation((5, 6, 7), ((1, 1),))
    served = ServedPrompt((5, 6, 8), "length", DraftCounts(1, (1, 0)))
    assert not compare_prompt(ours, served, 2).is_comparable


@pytest.mark.parametrize(
    ("ours", "theirs", "index"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2, 3), (1, 2), 2), ((), (1,), 0)],
)
def test_the_first_difference_of_two_texts(
    ours: tuple[int, ...], theirs: tuple[int, ...], index: int | None
) -> None:
    assert first_difference(ours, theirs) == index


# -- the rung in a run ----------------------------------------------------------------------------


def make_run(path: Path, **engine: Any) -> Config:
    """A run whose head is validated, as far as export can tell."""
    subject = make_subject(path)
    config = Config(
        run=RunConfig("x", root=str(path / "runs")),
        target=TargetConfig(str(path / "target"), dtype="float32", device="cpu"),
        data=DataConfig(),
        runtime=RUNTIME,
        validate=ValidateConfig(head=str(subject.head_path), max_tokens=16, rungs=("P6",)),
        engine=ServingConfig(
            kind="vllm",
            python="python3",
            k=(1, 2),
            sets=("gsm8k",),
            exact_prompts=6,
            exact_tokens=16,
            **engine,
        ),
    )
    run = RunDirectory.from_config(config)
    content = {
        "passed": True,
        "target": subject.target(torch.float32).fingerprint,
        "head": str(run.head),
        "head_sha256": hash_files(run.head),
        "rungs": {"P2": RungResult("P2", True).to_dict({})},
        "acceptance": [],
        "speed": [],
        "breakdown": [],
    }
    write_json_atomic(run.head / "parity.json", content)
    write_json_atomic(run.parity_file, content)
    return config


def export(config: Config) -> Path:
    run = RunDirectory.from_config(config)
    out = run.export("mimo")
    write_export(run.head, out, format="mimo", target_dir=Path(config.target.path))
    return out


@pytest.fixture
def tiny_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"gsm8k": [tuple(prompt) for prompt in make_prompts()]}
    monkeypatch.setattr(engine_rung, "load_prompts", lambda config, subject: prompts)


def climb(config: Config) -> engine_rung.EngineClimb:
    run = RunDirectory.from_config(config)
    engine = Subject(config.target.path, run.export("mimo"), torch.float32, RUNTIME)
    return engine_rung.climb(config, device=CPU, serve=as_engine(engine, torch.float32))


@pytest.mark.usefixtures("tiny_prompts")
def test_the_rung_is_written_for_run_head_and_export_and_climbed_once(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    out = export(config)
    first = climb(config)
    assert first.is_new
    assert first.result.passed
    assert {row["k"] for row in first.result.figures["sets"]} == {1, 2}
    run = RunDirectory.from_config(config)
    for place in (run.root, run.head, out):
        content = read_json(place / "parity.json")
        assert content["rungs"]["P6"]["passed"]
        assert content["rungs"]["P2"]["passed"]  # what was there stays
        assert content["passed"]
    assert "P6 passed: fake 1" in (out / "README.md").read_text()
    assert ExportRecord.read(out / EXPORT_NAME)  # still what was written
    again = climb(config)
    assert not again.is_new
    assert again.result == first.result
    longer = replace(config, engine=replace(config.engine, exact_tokens=17))
    assert climb(longer).is_new


@pytest.mark.usefixtures("tiny_prompts")
def test_a_failed_rung_takes_the_pass_away(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    out = export(config)
    run = RunDirectory.from_config(config)
    add_rung(RungResult("P6", False, note="bad"), run, out, target="t")
    for place in (run.root, run.head, out):
        assert not read_json(place / "parity.json")["passed"]
    assert stored_rung(run, "P6") == RungResult("P6", False, note="bad")
    assert stored_rung(run, "P5") is None


@pytest.mark.usefixtures("tiny_prompts")
def test_a_failed_rung_is_climbed_again(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    out = export(config)
    run = RunDirectory.from_config(config)
    inputs = engine_rung.engine_inputs(config, out, device=CPU)
    failed = RungResult("P6", False, figures={"inputs": inputs})
    add_rung(failed, run, out, target="t")
    again = climb(config)
    assert again.is_new
    assert again.result.passed
    assert again.result.figures["inputs"] == inputs


@pytest.mark.usefixtures("tiny_prompts")
def test_the_ladder_need_not_be_climbed_again_after_p6(tmp_path: Path) -> None:
    """Its record follows the report that the rung was added to, and no other."""
    config = make_run(tmp_path)
    out = export(config)
    run = RunDirectory.from_config(config)
    from runtime.files import sha256_file

    record = {"finished": True, "outputs": {"parity_sha256": sha256_file(run.parity_file)}}
    write_json_atomic(run.validate_file, record)
    climb(config)
    now = sha256_file(run.parity_file)
    assert read_json(run.validate_file)["outputs"]["parity_sha256"] == now
    write_json_atomic(run.validate_file, {"finished": True, "outputs": {"parity_sha256": "x"}})
    add_rung(RungResult("P6", True), run, out, target="t")
    assert read_json(run.validate_file)["outputs"]["parity_sha256"] == "x"


def test_without_an_export_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with pytest.raises(ValueError, match=r"`mtp export run.name=x target.path=.*` first"):
        run_validate(config)


def test_an_export_of_another_head_is_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    export(config)
    head = RunDirectory.from_config(config).head
    spec, tensors = load_head(head)
    save_head(head, spec, {**tensors, "norm.weight": tensors["norm.weight"] * 2})
    with pytest.raises(ValueError, match="was made of another head"):
        engine_rung.exported_head(config)


def test_a_tampered_export_is_not_served(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    out = export(config)
    served = read_json(out / "config.json")
    write_json_atomic(out / "config.json", served | {"rope_theta": 1.0})
    with pytest.raises(ValueError, match="rope_theta"):
        engine_rung.exported_head(config)


def test_an_exported_directory_may_itself_be_the_head(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    out = export(config)
    config = replace(config, validate=replace(config.validate, head=str(out)))
    assert engine_rung.exported_head(config) == out


@pytest.mark.usefixtures("tiny_prompts")
def test_bf16_takes_prompts_until_there_are_drafts_enough(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    export(config)
    config = replace(config, validate=replace(config.validate, min_drafts=1))
    out = RunDirectory.from_config(config).export("mimo")
    subject = Subject(config.target.path, out, torch.bfloat16, RUNTIME)
    found = [tuple(prompt) for prompt in make_prompts()] * 8
    few = engine_rung._decode_enough(config, subject, torch.bfloat16, 2, found)
    assert [generation.prompt_ids for generation in few] == found[: len(few)]
    assert len(few) == 16  # one helping
    many = replace(config, validate=replace(config.validate, min_drafts=100_000))
    assert len(engine_rung._decode_enough(many, subject, torch.bfloat16, 2, found)) == len(found)

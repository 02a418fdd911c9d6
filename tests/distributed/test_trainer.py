"""The trainer under DeepSpeed on gloo ranks: equality, skipped steps, kill and resume."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from mtp_train.events import read_events
from mtp_train.losses import head_loss, loss_weight
from mtp_train.packing import pack, plan_epoch
from runtime.head_spec import load_head
from runtime.seeds import derive_seed
from tests.distributed.trainer_worker import Job, TinyStore, make_config, run_jobs
from tests.unit.trainer.reference import random_embedding, random_head, tiny_spec

STAGES = (0, 1, 2, 3)
CHECKPOINTED = {"activation_checkpointing": True}
FIGURES = ("loss", "hidden_loss", "logit_loss", "learning_rate", "grad_norm", "num_active")


def steps_of(root, name="run"):
    """The loss log without replayed steps: the last record of each step."""
    path = root / name / "events.jsonl"
    return {e["step"]: e for e in read_events(path, event="step")}


def check_same_curve(ours, theirs, rel):
    assert ours.keys() == theirs.keys()
    assert len(ours) > 3
    for step, record in ours.items():
        for figure in FIGURES:
            assert record[figure] == pytest.approx(theirs[step][figure], rel=rel), (step, figure)


@pytest.fixture(scope="module")
def equality_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("equality")
    runs = {}
    for world in (1, 2):
        jobs = [Job(str(root), f"stage{s}-world{world}", zero_stage=s) for s in STAGES]
        jobs.append(
            Job(
                str(root),
                f"accumulate-world{world}",
                zero_stage=2,
                trainer={"gradient_accumulation": 3},
            )
        )
        jobs.append(
            Job(
                str(root),
                f"sub-vocabulary-world{world}",
                zero_stage=1,
                kept=40,
                loss={"tail_sample_size": 8},
            )
        )
        jobs.append(
            Job(
                str(root),
                f"noise-world{world}",
                zero_stage=1,
                loss={"kind": "expected_length"},
                trainer={"feature_noise": 0.3, "gradient_accumulation": 2},
            )
        )
        jobs += [
            Job(
                str(root),
                f"muon-stage{s}-world{world}",
                zero_stage=s,
                trainer={"optimizer": "muon"},
            )
            for s in STAGES
        ]
        if world == 2:
            for stage, more in ((0, {}), (2, {"attention": "flash"}), (3, CHECKPOINTED)):
                shared = {"sequence_parallel": 2} | more
                jobs.append(Job(str(root), f"rows-stage{stage}", zero_stage=stage, trainer=shared))
        for stage, offload in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")):
            name = f"offload-{offload}{stage}-world{world}"
            jobs.append(Job(str(root), name, zero_stage=stage, offload=offload))
        for job, outcome in zip(
            jobs, run_jobs(jobs, world_size=world, scratch=root / f"w{world}"), strict=True
        ):
            assert "error" not in outcome, outcome.get("trace")
            runs[job.name] = outcome
    return root, runs


def test_every_zero_stage_and_world_size_trains_the_same_head(equality_runs):
    root, runs = equality_runs
    reference, curve = runs["stage0-world1"], steps_of(root, "stage0-world1")
    # clipping must be at work, or a rank-local norm would go unseen
    assert all(record["grad_norm"] > 0.5 for record in curve.values())
    for name, outcome in runs.items():
        if name.startswith(("sub", "noise", "muon")):
            continue
        check_same_curve(steps_of(root, name), curve, rel=2e-4)
        for tensor_name, tensor in outcome["tensors"].items():
            torch.testing.assert_close(
                tensor, reference["tensors"][tensor_name], rtol=1e-3, atol=2e-5, msg=name
            )


def test_muon_steps_along_whole_matrices_at_every_stage_and_world_size(equality_runs):
    """Newton-Schulz in bfloat16 makes more of differences in the last bit than AdamW does."""
    root, runs = equality_runs
    names = [f"muon-stage{stage}-world{world}" for stage in STAGES for world in (1, 2)]
    reference, curve = runs[names[0]], steps_of(root, names[0])
    for name in names[1:]:
        check_same_curve(steps_of(root, name), curve, rel=2e-3)
        for tensor_name, tensor in runs[name]["tensors"].items():
            expected = reference["tensors"][tensor_name]
            torch.testing.assert_close(tensor, expected, rtol=1e-2, atol=3e-4, msg=name)
    adamw = steps_of(root, "stage0-world1")
    assert curve[max(curve)]["loss"] != pytest.approx(adamw[max(adamw)]["loss"], rel=1e-2)


def test_two_ranks_that_share_out_rows_train_what_one_rank_trains(equality_runs):
    root, runs = equality_runs
    curve = steps_of(root, "stage0-world1")
    for name in ("rows-stage0", "rows-stage2", "rows-stage3"):
        check_same_curve(steps_of(root, name), curve, rel=1e-5)
        for tensor_name, tensor in runs[name]["tensors"].items():
            expected = runs["stage0-world1"]["tensors"][tensor_name]
            torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=2e-5, msg=name)


def test_the_engine_trains_what_a_plain_loop_trains(equality_runs):
    root, runs = equality_runs
    job = Job(str(root))
    config, store, spec = make_config(job), TinyStore(job), tiny_spec()
    embedding, lm_head = random_embedding(spec), random_embedding(spec, seed=8)
    head = random_head(spec)
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    curve = steps_of(root, "stage0-world1")
    plan = [
        indices
        for epoch in range(2)
        for indices in plan_epoch(
            store.lengths.tolist(),
            tokens_per_step=40,
            seed=derive_seed(config.seed, "order"),
            epoch=epoch,
        )
    ]
    for number, indices in enumerate(plan, start=1):
        batch = pack([store.samples[i] for i in indices], num_steps=2)
        parts = head_loss(head(batch, embedding), batch, lm_head, config=config.loss)
        loss = parts.total / loss_weight(batch.num_active, step_decay=0.6)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = curve[number]["learning_rate"]
        optimizer.step()
        assert curve[number]["loss"] == pytest.approx(loss.item(), rel=2e-4)
        assert curve[number]["grad_norm"] == pytest.approx(norm.item(), rel=2e-4)
    assert len(curve) == len(plan)
    for name, tensor in head.export_tensors().items():
        expected = runs["stage0-world1"]["tensors"][name]
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=2e-5, msg=name)


def test_every_step_says_where_its_seconds_went(equality_runs):
    root, _ = equality_runs
    phases = {"data_wait", "pack", "forward", "loss", "backward", "optimiser"}
    for step in steps_of(root, "accumulate-world2").values():
        assert step["seconds"].keys() == phases
        assert all(step["seconds"][name] > 0 for name in phases)


def test_sub_vocabulary_loss_does_not_depend_on_the_world_size(equality_runs):
    root, _ = equality_runs
    one, two = (steps_of(root, f"sub-vocabulary-world{world}") for world in (1, 2))
    check_same_curve(one, two, rel=2e-4)


def test_feature_noise_and_coupled_steps_do_not_depend_on_the_world_size(equality_runs):
    root, runs = equality_runs
    one, two = (steps_of(root, f"noise-world{world}") for world in (1, 2))
    check_same_curve(one, two, rel=2e-4)
    for name, tensor in runs["noise-world1"]["tensors"].items():
        other = runs["noise-world2"]["tensors"][name]
        torch.testing.assert_close(tensor, other, rtol=1e-3, atol=2e-5, msg=name)


def test_embedding_and_lm_head_are_outside_the_engine_and_unchanged(equality_runs):
    _, runs = equality_runs
    for outcome in runs.values():
        assert outcome["is_frozen"]
        assert not any("embed" in n or "lm_head" in n for n in outcome["module_names"])


def test_last_head_is_written_when_nothing_validates(equality_runs):
    root, runs = equality_runs
    for name in ("stage0-world1", "stage3-world2"):
        _, tensors = load_head(root / name / "head")
        for tensor_name, tensor in runs[name]["tensors"].items():
            assert torch.equal(tensors[tensor_name], tensor)


@pytest.fixture(scope="module")
def faulty_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    lowp = {"dtype": "bfloat16"}
    jobs = [
        Job(str(root), "nan-fp32", zero_stage=0, nan_samples=(4,)),
        Job(str(root), "nan-bf16-1", zero_stage=1, nan_samples=(4,), **lowp),
        Job(str(root), "nan-bf16-2", zero_stage=2, nan_samples=(4,), **lowp),
        Job(str(root), "nan-bf16-3", zero_stage=3, nan_samples=(4,), **lowp),
        Job(str(root), "hopeless", nan_samples=tuple(range(13)), trainer={"max_nonfinite_run": 3}),
        Job(str(root), "bf16-plain", zero_stage=0, **lowp),
        Job(
            str(root),
            "overflow",
            zero_stage=2,
            loss={"hidden_weight": 1e22},
            trainer={"max_nonfinite_run": 3},
        ),
        Job(
            str(root),
            "validated",
            zero_stage=2,
            taus=(1.2, 1.5, 1.5, 1.1),
            trainer={"validate_every": 2, "max_steps": 7, "checkpoint_every": 100},
        ),
        Job(str(root), "all-masked", zero_stage=2, num_samples=3, trainer={"tokens_per_step": 1}),
    ]
    outcomes = run_jobs(jobs, world_size=2, scratch=root / "scratch")
    return root, {job.name: outcome for job, outcome in zip(jobs, outcomes, strict=True)}


@pytest.mark.parametrize("name", ["nan-fp32", "nan-bf16-1", "nan-bf16-2", "nan-bf16-3"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(faulty_runs, name):
    root, outcomes = faulty_runs
    assert "error" not in outcomes[name], outcomes[name].get("trace")
    steps = steps_of(root, name)
    skipped = [s for s, e in steps.items() if e["loss"] == "nan"]
    assert len(skipped) == 2  # one sample, two epochs
    report = outcomes[name]["report"]
    assert (report["skipped"], report["updates"]) == (2, len(steps) - 2)
    for step in skipped:
        if step + 1 in steps:  # the schedule stands still
            assert steps[step + 1]["learning_rate"] == steps[step]["learning_rate"]
    after = [e["loss"] for s, e in steps.items() if s not in skipped]
    assert all(isinstance(loss, float) for loss in after)
    assert all(t.isfinite().all() for t in outcomes[name]["tensors"].values())
    logged = list(read_events(root / name / "events.jsonl", event="skipped_step"))
    assert [e["step"] for e in logged] == skipped


def test_too_many_steps_in_a_row_without_finite_gradients_end_the_run(faulty_runs):
    _, outcomes = faulty_runs
    assert "TrainingDivergedError: 3 steps in a row" in outcomes["hopeless"]["error"]


def test_gradients_whose_norm_overflows_are_skipped_though_the_loss_is_finite(faulty_runs):
    root, outcomes = faulty_runs
    assert "TrainingDivergedError: 3 steps in a row" in outcomes["overflow"]["error"]
    assert all(isinstance(e["loss"], float) for e in steps_of(root, "overflow").values())


def test_bfloat16_without_zero_is_refused(faulty_runs):
    _, outcomes = faulty_runs
    assert "deepspeed.zero_stage=0 with bfloat16" in outcomes["bf16-plain"]["error"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_runs_accumulate_and_communicate_in_float32(faulty_runs, stage):
    _, outcomes = faulty_runs
    outcome = outcomes[f"nan-bf16-{stage}"]
    assert outcome["communication"] == outcome["accumulation"] == "torch.float32"
    assert all(t.dtype == torch.bfloat16 for t in outcome["tensors"].values())


def test_every_rank_steps_when_a_step_has_fewer_samples_than_ranks_or_no_mask(faulty_runs):
    root, outcomes = faulty_runs
    assert "error" not in outcomes["all-masked"], outcomes["all-masked"].get("trace")
    steps = steps_of(root, "all-masked")
    assert len(steps) == 6
    assert [e["loss"] for e in steps.values() if e["num_active"] == 0] == [0.0, 0.0]


def test_best_checkpoint_has_the_highest_tau_and_the_lower_loss_on_a_tie(faulty_runs):
    root, outcomes = faulty_runs
    outcome = outcomes["validated"]
    assert outcome["validated"] == [2, 4, 6, 7]
    validations = list(read_events(root / "validated" / "events.jsonl", event="validation"))
    losses = {e["step"]: e["loss"] for e in validations}
    expected = 6 if losses[6] < losses[4] else 4
    assert outcome["report"]["best"]["step"] == expected
    directory = root / "validated" / "checkpoints"
    assert (directory / "best").resolve().name == f"step-{expected:06d}"
    names = sorted(p.name for p in directory.iterdir() if p.is_dir() and not p.is_symlink())
    assert names == sorted({f"step-{expected:06d}", "step-000007"} | set(names))
    _, tensors = load_head(root / "validated" / "head")
    digest = sum(t.float().abs().sum().item() for t in tensors.values())
    assert digest == losses[expected]


IMPATIENT = {
    "taus": (1.2, 1.5, 1.5, 1.4, 1.9),
    "trainer": {"validate_every": 2, "max_steps": 10, "checkpoint_every": 1, "patience": 2},
}


def test_a_run_ends_after_validations_without_a_higher_tau(tmp_path):
    (whole,) = run_jobs([Job(str(tmp_path), "run", **IMPATIENT)], world_size=1, scratch=tmp_path)
    assert whole["validated"] == [2, 4, 6, 8]  # the tie at 6 is not higher, 1.9 is never seen
    assert whole["report"]["steps"] == 8
    (event,) = read_events(tmp_path / "run" / "events.jsonl", event="early_stop")
    best = whole["report"]["best"]
    assert (event["step"], event["tau"], event["best_step"]) == (8, 1.5, best["step"])
    assert best["step"] in (4, 6)
    _, tensors = load_head(tmp_path / "run" / "head")
    assert best["loss"] == sum(t.float().abs().sum().item() for t in tensors.values())
    jobs = [Job(str(tmp_path), "run", **IMPATIENT)]
    (again,) = run_jobs(jobs, world_size=1, scratch=tmp_path)
    assert again["validated"] == []  # what has stopped stays stopped
    assert again["report"]["best"] == best


@pytest.mark.parametrize("kill_at", [5, 7])
def test_patience_counts_on_after_a_kill(tmp_path, kill_at):
    """Killed after the checkpoint of that step: nothing is forgotten of what was measured."""
    kill_job = Job(
        str(tmp_path), "run", kill_point="checkpoint: published", kill_at=kill_at, **IMPATIENT
    )
    assert run_jobs([kill_job], world_size=1, scratch=tmp_path) is None
    jobs = [Job(str(tmp_path), "run", **IMPATIENT)]
    (resumed,) = run_jobs(jobs, world_size=1, scratch=tmp_path)
    assert resumed["report"]["steps"] == 8
    assert resumed["validated"][-1] == 8


KILL_JOB = {
    "zero_stage": 1,
    "dtype": "bfloat16",
    "kept": 40,
    "loss": {"tail_sample_size": 8},
    "taus": (1.2, 1.5, 1.3, 1.6),
    "trainer": {"epochs": 2, "validate_every": 2, "max_steps": 8, "feature_noise": 0.1},
}


CHECKPOINT_POINTS = (
    "checkpoint: start",
    "checkpoint: engine written",
    "checkpoint: synced",
    "checkpoint: published",
    "checkpoint: pruning",
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The run that nobody kills, at one and two ranks."""
    root = tmp_path_factory.mktemp("kills")
    outcomes = {}
    for world in (1, 2):
        job = Job(str(root), f"whole{world}", **KILL_JOB)
        (outcomes[world],) = run_jobs([job], world_size=world, scratch=root / "scratch")
        assert "error" not in outcomes[world], outcomes[world].get("trace")
    return root, outcomes


def resume_and_compare(root, name, whole, *, world_size=1):
    """Run to the end, and find what the uninterrupted run left."""
    job = Job(str(root), name, **KILL_JOB)
    (outcome,) = run_jobs([job], world_size=world_size, scratch=root / "scratch")
    assert "error" not in outcome, outcome.get("trace")
    reference = f"whole{world_size}"
    ours, theirs = steps_of(root, name), steps_of(root, reference)
    assert ours.keys() == theirs.keys()
    for step, record in ours.items():
        for figure in (*FIGURES, "updates", "skipped"):
            assert record[figure] == theirs[step][figure], (name, step, figure)
    assert outcome["report"]["best"] == whole["report"]["best"]
    assert hash_files(root / name) == hash_files(root / reference)
    for tensor_name, tensor in outcome["tensors"].items():
        assert torch.equal(tensor, whole["tensors"][tensor_name]), (name, tensor_name)
    best = root / name / "checkpoints" / "best"
    assert best.resolve().name == f"step-{whole['report']['best']['step']:06d}"
    leftovers = [p.name for p in best.parent.iterdir() if p.name.startswith(".")]
    assert not leftovers


def kill(root, name, *, world_size=1, **where):
    """Whether the run died at the place it was told to."""
    job = Job(str(root), name, **where, **KILL_JOB)
    return run_jobs([job], world_size=world_size, scratch=root / "scratch") is None


@pytest.mark.slow
def test_killed_anywhere_a_resumed_run_equals_an_uninterrupted_one(whole_run):
    root, outcomes = whole_run
    draw = random.Random(5)
    firsts = draw.sample(range(1, len(outcomes[1]["points"]) + 1), 4)
    num_kills = 0
    for number, first in enumerate(firsts):
        name = f"anywhere{number}"
        for point in (first, draw.randint(1, 6)):  # the second kill hits the resumed run
            num_kills += kill(root, name, kill_at=point)
        resume_and_compare(root, name, outcomes[1])
    assert num_kills >= 6


@pytest.mark.slow
@pytest.mark.parametrize("point", CHECKPOINT_POINTS)
def test_killed_in_any_phase_of_a_checkpoint_a_run_resumes_exactly(whole_run, point):
    root, outcomes = whole_run
    checkpoint_points = {p for p in outcomes[1]["points"] if p.startswith("checkpoint")}
    assert checkpoint_points == set(CHECKPOINT_POINTS), "a phase that no test kills in"
    name = point.replace(": ", "-").replace(" ", "-")
    # the first checkpoint has nothing to fall back on, the second one has
    assert kill(root, name, kill_point=point, kill_at=1)
    if point in ("checkpoint: engine written", "checkpoint: published"):
        assert kill(root, name, kill_point=point, kill_at=2)
    resume_and_compare(root, name, outcomes[1])


@pytest.mark.slow
def test_killed_by_the_clock_a_run_resumes_exactly(whole_run):
    root, outcomes = whole_run
    draw = random.Random(11)
    num_kills = 0
    for number in range(3):
        delay_s = draw.uniform(0.05, 0.8) * outcomes[1]["span_s"]
        num_kills += kill(root, f"clock{number}", kill_after_s=delay_s)
        resume_and_compare(root, f"clock{number}", outcomes[1])
    assert num_kills >= 1  # a run may be faster than the one that was timed


@pytest.mark.slow
def test_two_ranks_of_which_one_was_killed_resume_exactly(whole_run):
    root, outcomes = whole_run
    where = {"kill_point": "checkpoint: engine written", "kill_at": 2, "kill_rank": 1}
    assert kill(root, "two-ranks", world_size=2, **where)
    resume_and_compare(root, "two-ranks", outcomes[2], world_size=2)


def hash_files(run):
    return hashlib.sha256((run / "head" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_muon_run_resumes_exactly(tmp_path, stage):
    shared = {"zero_stage": stage, "dtype": "bfloat16"}
    shared["trainer"] = {"optimizer": "muon", "max_steps": 6, "checkpoint_every": 2}

    def run(name, **where):
        job = Job(str(tmp_path), name, **where, **shared)
        return run_jobs([job], world_size=2, scratch=tmp_path / "scratch")

    (whole,) = run("whole")
    assert run("killed", kill_point="checkpoint: published", kill_at=2) is None
    (resumed,) = run("killed")
    for outcome in (whole, resumed):
        assert "error" not in outcome, outcome.get("trace")
    assert steps_of(tmp_path, "killed").keys() == steps_of(tmp_path, "whole").keys()
    for name, tensor in resumed["tensors"].items():
        assert torch.equal(tensor, whole["tensors"][name]), name

"""Plans by hand: hours, disk, memory and advice of small cases and of hardware that is not here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_train.config import Config, DeepSpeedConfig, PlanConfig
from mtp_train.features.estimate import estimate_size
from mtp_train.plan.bill import USABLE_SHARE, Plan, make_plan
from mtp_train.plan.command import plan_for, target_facts, to_json
from mtp_train.plan.facts import TargetFacts, parse_facts, plan_head_spec
from mtp_train.plan.hardware import (
    Hardware,
    Line,
    Speeds,
    find_hardware,
    load_calibration,
    save_calibration,
)
from mtp_train.plan.step_cost import count_step
from mtp_train.settings import ConfigError
from tests.unit.cli.test_commands import compose

SMALL = parse_facts(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "tie_word_embeddings": True,
    },
    name="small",
    source="small",
)
# Powers of ten, so that each term of a sum can be told apart.
SPEEDS = Speeds(
    forward=Line(1.0, 1e6),
    backward=Line(0.0, 1e7),
    loss_full=Line(0.0, 1e8),
    loss_hot=Line(0.0, 1e9),
    normaliser=Line(0.0, 1e9),
    optimiser=Line(0.0, 1e5),
    pack=Line(0.0, 1e3),
    dump=Line(0.0, 1e9),
    decode=Line(0.5, 1e6),
    disk_bytes_per_s=1e12,
    base_bytes=12345.0,
)
HERE = Hardware(
    *("here", 1, 1e9, SPEEDS),
    is_cpu=True,
    measured_on="small",
    dtype="float32",
    train_dtype="float32",
)


def configure(*settings: str) -> Config:
    return compose(
        "plan",
        [
            *("data.max_tokens_total=12000", "trainer.tokens_per_step=1000", "trainer.epochs=2"),
            *("plan.row_tokens=100", "plan.answer_tokens=60", "trainer.validate_every=0"),
            *settings,
        ],
    )


def plan(*settings: str, facts: TargetFacts = SMALL, hardware: Hardware = HERE) -> Plan:
    config = configure(*settings)
    return make_plan(config, facts, hardware, num_tokens=config.data.max_tokens_total)


def test_hours_are_the_sums_that_the_formulas_say() -> None:
    made = plan()
    config = configure()
    spec = plan_head_spec(SMALL, config.head)
    tokens = 1050  # a step ends half a row late
    cost = count_step(spec, config.loss, made.rows, num_tokens=tokens, dtype=torch.float32)
    step = 1 + cost.forward_flops / 1e6 + cost.backward_flops / 1e7 + cost.loss_flops / 1e8
    step += tokens / 1e3 + made.num_head_weights / 1e5
    assert made.step_seconds == pytest.approx(step)
    assert made.steps == 2 * math.ceil(12000 / tokens)
    seconds = {time.name: time.seconds for time in made.times}
    assert seconds["training"] == pytest.approx(made.steps * step)
    assert seconds["dump"] == pytest.approx(2 * SMALL.num_weights * 12000 / 1e9)
    step_s = 0.5 + 4 * SMALL.num_weights / 1e6
    assert seconds["answers"] == pytest.approx(12000 * 0.6 / 16 * step_s)
    assert made.hours("dump") == seconds["dump"] / 3600


def test_a_sub_vocabulary_adds_the_target_once_per_answer_token() -> None:
    made = plan("loss=hot", "loss.sub_vocab_size=100", "trainer.epochs=3")
    seconds = {time.name: time.seconds for time in made.times}
    once = 2 * 500 * 64 * 12000 * 0.6 / 1e9
    assert seconds["training"] == pytest.approx(made.steps * made.step_seconds + once)


def test_a_part_of_the_tokens_is_trained_on_and_all_are_dumped() -> None:
    whole, part = plan(), plan("trainer.max_tokens=3000")
    assert part.steps == math.ceil(3000 / 12000 * whole.steps)
    assert part.hours("dump") == whole.hours("dump")
    assert plan("trainer.max_tokens=99999999").steps == whole.steps


def test_disk_is_what_precompute_says() -> None:
    made = plan("features=fp8")
    for codec, size in made.features:
        expected = estimate_size([100] * 120, hidden_size=64, codec=codec).num_bytes
        assert size == expected
    assert made.feature_bytes == dict(made.features)["fp8_e4m3"]


EAGLE3 = ("head=eagle3", "loss=eagle3", "head.layer_ids=[1,2]")
MEDUSA = ("head=medusa", "loss=medusa")


def test_a_head_that_reads_residual_streams_has_more_features_and_its_own_lm_head() -> None:
    made, whole = plan(*EAGLE3, "head.draft_vocab_size=100"), plan(*EAGLE3)
    size = estimate_size([100] * 120, hidden_size=64, codec=made.codec, num_states=3).num_bytes
    assert made.feature_bytes == size
    d, inner, kv_dim = 64, 128, 32
    layer = 2 * d * d + 2 * 2 * d * kv_dim + d * d + 3 * d * inner
    assert made.num_head_weights == 2 * d * d + layer + 4 * d + 100 * d
    assert whole.num_head_weights - made.num_head_weights == 400 * d
    parts = {part.name: part.num_bytes for part in made.memory[1].parts}
    assert parts["frequent lm_head rows"] == 100 * d * 4
    assert "frequent lm_head rows" not in {part.name for part in whole.memory[1].parts}
    once = 2 * 500 * 64 * 12000 * 0.6 / 1e9  # the target's mass on the list
    seconds = {time.name: time.seconds for time in made.times}
    assert seconds["training"] == pytest.approx(made.steps * made.step_seconds + once)
    with pytest.raises(ValueError, match=r"head\.draft_vocab_size=500: must be below"):
        plan(*EAGLE3, "head.draft_vocab_size=500")
    with pytest.raises(ValueError, match=r"head\.layer_ids=\[1, 3\]"):
        plan(*EAGLE3, "head.layer_ids=[1,3]")


def test_a_medusa_head_keeps_no_keys_and_drafts_through_one_block() -> None:
    made, mtp = plan(*MEDUSA), plan()
    assert made.num_head_weights == 3 * (64 * 64 + 64)
    slots = 1024 * 16 * 4
    pool = next(part for part in made.memory[0].parts if part.name == "K/V pool")
    assert pool.num_bytes == slots * 3 * 2 * 2 * 16
    assert made.feature_bytes == mtp.feature_bytes
    assert made.hours("validation") < mtp.hours("validation")


def test_training_memory_has_every_part_and_the_target_only_where_it_validates() -> None:
    outside = plan().memory[1]
    names = [part.name for part in outside.parts]
    assert names == [
        *("process", "embedding, lm_head", "first weights", "features read", "head weights"),
        *("master weights", "moments", "gradients", "batch", "activations", "loss chunk"),
    ]
    inside = plan("trainer.validate_every=5").memory[1]
    names = [part.name for part in inside.parts]
    assert names[1:3] == ["target weights", "K/V pool"]
    sizes = {part.name: part.num_bytes for part in inside.parts}
    assert sizes["target weights"] == 4 * SMALL.num_weights
    assert sizes["K/V pool"] == 1024 * 16 * 4 * (3 + 1) * 2 * 2 * 16
    assert outside.total == sum(part.num_bytes for part in outside.parts)


def test_where_a_whole_step_does_not_fit_it_is_accumulated() -> None:
    roomy = plan()
    assert roomy.advice.gradient_accumulation == 1
    state = next(o for o in roomy.zero_options if o.zero_stage == 0).state_bytes
    parts = {part.name: part.num_bytes for part in roomy.memory[1].parts}
    host = parts["first weights"] + parts["features read"]
    fixed = state + SMALL.num_embedding_weights * 4 + 12345 + host
    need = plan("trainer.gradient_accumulation=4").memory[1].total  # a quarter of a step, and a row
    small = replace(HERE, memory_bytes=1.02 * need / USABLE_SHARE)
    assert fixed < need
    assert not plan(hardware=small).memory[1].fits
    advice = plan(hardware=small).advice
    assert advice.gradient_accumulation in (4, 5)  # whole rows are cut more finely than need be
    assert advice.micro_batch_tokens == 1000 // advice.gradient_accumulation
    assert plan(*advice.settings, hardware=small).memory[1].fits
    made = plan(hardware=replace(HERE, memory_bytes=fixed))
    assert made.advice.zero_stage is None


def test_a_stage_that_shares_more_is_recommended_when_only_it_fits() -> None:
    hardware = replace(find_hardware("8xh100"), memory_bytes=40e9)
    config = configure("deepspeed=zero1", "trainer.tokens_per_step=8000", "loss.row_chunk=8")
    facts = replace(SMALL, hidden_size=16384, head_inner=65536, head_heads=128, head_dim=128)
    made = make_plan(config, facts, hardware, num_tokens=12000)
    sizes = {option.zero_stage: option.state_bytes for option in made.zero_options}
    assert sizes[1] > 36e9 > sizes[2]
    assert made.advice.zero_stage == 2
    assert "deepspeed.zero_stage=2" in made.advice.settings


def test_a_target_that_one_device_cannot_hold_is_spread_and_said_so() -> None:
    config = compose("plan", ["target.path=Llama-3.3-70B", "data.max_tokens_total=1000000"])
    made = plan_for(config)
    assert made.advice.tensor_parallel == 4
    assert "features.tensor_parallel=4" in made.advice.settings
    assert any("one copy of the target takes 4 devices" in note for note in made.notes)
    assert not made.memory[1].fits  # validation inline would want it on each


def test_what_was_not_measured_is_marked_estimated() -> None:
    config = compose("plan", ["target.path=DeepSeek-V2-Lite", "data.max_tokens_total=1000000"])
    values = json.loads(to_json(plan_for(config)))
    assert values["is_estimated"]
    assert any("was not measured: hours are estimated" in note for note in values["notes"])
    assert values["memory"][1]["total"] > values["target"]["num_weights"] * 2
    measured = plan()
    assert measured.is_measured
    assert measured.notes == ()
    other = plan(facts=replace(SMALL, name="other"))
    assert not other.is_measured
    assert "rates were measured with small, not with other" in other.notes[0]


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "calibration.json"
    with pytest.raises(ValueError, match=r"measure this machine with plan\.calibrate=true"):
        load_calibration(file)
    save_calibration(HERE, file)
    assert load_calibration(file) == HERE
    file.write_text(file.read_text().replace('"pack"', '"sack"'))
    with pytest.raises(ValueError, match="damaged"):
        load_calibration(file)


@pytest.mark.parametrize("name", ["8xb300", "0xh100", "xh100", "8 h100"])
def test_hardware_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"known are here .* a100, h100, h200"):
        find_hardware(name)


def test_targets_that_are_not_known_are_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"Llama-3\.2-1B, .*DeepSeek-V2-Lite.*smollm2-135m"):
        target_facts(compose("plan", ["target.path=gpt-9"]))
    with pytest.raises(ValueError, match=r"target\.path is not set"):
        target_facts(compose("plan", []))


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.hardware=8xh100 with plan\.calibrate=true"):
        compose("plan", ["plan.calibrate=true"])
    with pytest.raises(ConfigError, match=r"plan\.answer_tokens=400 with plan\.row_tokens=402"):
        compose("plan", ["plan.row_tokens=402"])
    with pytest.raises(ValueError, match=r"loss\.sub_vocab_size=500: must be below"):
        plan("loss=hot", "loss.sub_vocab_size=500")


def test_defaults_of_the_section_are_those_of_its_file() -> None:
    config = compose("plan", [])
    assert config.plan == PlanConfig()
    assert config.deepspeed == DeepSpeedConfig()


def test_offloaded_states_are_the_hosts_and_said_so() -> None:
    hardware = find_hardware("8xh100")
    on_device, offloaded = (
        make_plan(
            configure("deepspeed=zero2", f"deepspeed.offload={offload}"),
            SMALL,
            hardware,
            num_tokens=12000,
        )
        for offload in ("none", "optimizer")
    )
    assert offloaded.memory[1].total < on_device.memory[1].total
    names = [part.name for part in offloaded.memory[1].parts]
    assert "moments" not in names
    assert "offloaded" not in names
    assert any(note.startswith("deepspeed.offload=optimizer: ") for note in offloaded.notes)
    here = plan("deepspeed=zero2", "deepspeed.offload=optimizer")
    sizes = {part.name: part.num_bytes for part in here.memory[1].parts}
    assert sizes["offloaded"] == 24 * here.num_head_weights  # on a CPU the host is the device

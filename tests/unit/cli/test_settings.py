"""Plain values into the frozen configuration: what is accepted, and what each refusal says."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_train import rules
from mtp_train.app import CONF_DIR, dump_config
from mtp_train.config import Config
from mtp_train.settings import ConfigError, get_field, known_keys, load_config
from runtime.head_spec import EAGLE3_FIELDS, EAGLE_FIELDS, MEDUSA_FIELDS

MINIMAL: dict[str, Any] = {
    "run": {"name": "mine"},
    "target": {"path": "/models/llama"},
    "data": {"sources": ["my.jsonl"]},
}


def _with(*changes: tuple[str, Any]) -> dict[str, Any]:
    raw = copy.deepcopy(MINIMAL)
    for path, value in changes:
        *sections, last = path.split(".")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return raw


def test_missing_keys_take_the_dataclass_defaults() -> None:
    config = load_config(MINIMAL)
    assert config.trainer == Config.__dataclass_fields__["trainer"].default
    assert config.data.sources == ("my.jsonl",)


def test_values_get_the_declared_types() -> None:
    config = load_config(
        _with(
            ("trainer.learning_rate", 1),
            ("trainer.betas", [0.8, 0.9]),
            ("deepspeed.zero_stage", 2),
            ("run.name", 7),
            ("data.chat_template_kwargs", {"enable_thinking": False}),
        )
    )
    assert type(config.trainer.learning_rate) is float
    assert config.trainer.betas == (0.8, 0.9)
    assert config.deepspeed.zero_stage == 2
    assert config.run.name == "7"
    assert config.data.chat_template_kwargs == (("enable_thinking", "false"),)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("trainer.epoch", 3, r"^trainer\.epoch: unknown key; did you mean trainer\.epochs\?$"),
        ("trainr", {}, r"^trainr: unknown key; did you mean trainer\?$"),
        ("loss.learning_rate", 1.0, r"did you mean trainer\.learning_rate"),
        ("run.zzz", 1, r"^run\.zzz: unknown key; run has name, root, group$"),
        ("data.regenerate.temprature", 1.0, r"did you mean data\.regenerate\.temperature\?$"),
        ("trainer.epochs", 1.5, r"^trainer\.epochs=1\.5: expected a whole number, got a number$"),
        ("trainer.epochs", "two", r"expected a whole number, got text$"),
        ("trainer.epochs", True, r"expected a whole number, got true or false$"),
        ("trainer.tensorboard", 1, r"expected true or false, got a whole number$"),
        ("trainer.learning_rate", None, r"expected a number, got null$"),
        ("trainer", 3, r"^trainer=3: expected a section with keys"),
        ("data.sources", "my.jsonl", r"expected a list, got text; write data\.sources=\[my\.jsonl"),
        ("data.sources", ["a", 1.5], r"^data\.sources\[1\]=1\.5: expected text"),
        ("trainer.betas", [0.9], r"expected 2 values, got 1$"),
        ("trainer.schedule", "lineer", r"allowed are linear, cosine, wsd; did you mean linear\?$"),
        ("deepspeed.zero_stage", 4, r"^deepspeed\.zero_stage=4: allowed are 0, 1, 2, 3"),
        ("deepspeed.zero_stage", True, r"^deepspeed\.zero_stage=True: allowed are 0, 1, 2, 3"),
        ("run.name", "???", r"^run\.name: not set; give it a value, as in run\.name="),
        ("run.name", "../up", r"one plain folder name"),
        ("run.name", ".hidden", r"one plain folder name"),
        ("loss.num_unroll_steps", 0, r"^loss\.num_unroll_steps=0: must be at least 1$"),
        ("trainer.weight_decay", -0.1, r"must not be negative$"),
        ("trainer.feature_noise", -0.1, r"must not be negative$"),
        ("trainer.patience", -1, r"must not be negative$"),
        ("loss.lk_eta", -1.0, r"must not be negative$"),
        ("export.format", "qwen", r"gate its queries, .*nearest are eagle3, .*allowed are mimo"),
        ("loss.kind", "kl", r"allowed are soft_ce, forward_kl, reverse_kl, tv"),
        ("trainer.clip_norm", 0.0, r"must be greater than 0$"),
        ("runtime.page_size", 0, r"^runtime\.page_size=0: must be at least 1$"),
        ("data.path", "/no/such/set", r"^data\.path=/no/such/set: no such directory$"),
        ("data.chat_template", "/no/template.jinja", r"no such file$"),
        ("validate.rungs", ["P2", "P9"], r"P9 is unknown; allowed are P0 to P6$"),
        ("validate.rungs", [], r"name at least one"),
        (
            "validate.sets",
            [],
            r"^validate\.sets=\[\]: name at least one of mtbench, humaneval, gsm8k",
        ),
        ("validate.sets", ["sharegpt"], r"sharegpt is unknown; allowed are mtbench, humaneval"),
        ("validate.sets", ["gsm8k", "gsm8k"], r"each set may be named once"),
        ("validate.max_prompts", -1, r"must not be negative$"),
        ("validate.turns", 3, r"^validate\.turns=3: must be 1 or 2$"),
        ("features.p0_references", [], r"^features\.p0_references=\[\]: name decode, huggingface"),
        ("trainer.warmup_share", 1.0, r"must be a share"),
        ("trainer.betas", [0.9, 1.0], r"each must be in \[0, 1\)$"),
        ("check_render.url", "a:80", r"^check_render\.url='a:80': expected an address such as"),
        ("check_render.url", "http://a:b@c", r"name that in check_render\.api_key_env$"),
        ("check_render.api_key_env", "sk-1", r"^check_render\.api_key_env: expected the name of"),
    ],
)
def test_a_wrong_value_is_refused_with_one_clear_line(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(_with((path, value)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "data.regenerate.enabled": True,
                "data.regenerate.capture_features": True,
                "features.source": "huggingface",
            },
            r"features\.source=huggingface with data\.regenerate\.capture_features=true",
        ),
        (
            {"data.regenerate.enabled": True, "data.format": "tokenized"},
            r"data\.format=tokenized with data\.regenerate\.enabled=true",
        ),
        (
            {"data.regenerate.enabled": True, "data.max_tokens": 4096},
            r"decoded within runtime\.max_model_len=2048",
        ),
        ({"loss.hidden_weight": 0.0, "loss.logit_weight": 0.0}, "nothing to train on"),
        (
            {"loss.kind": "tv", "loss.logit_weight": 0.0},
            r"^loss\.kind=tv with loss\.logit_weight=0: .* has no weight",
        ),
        (
            {"loss.kind": "reverse_kl", "loss.sub_vocab_size": 99},
            r"^loss\.kind=reverse_kl with loss\.sub_vocab_size=99: .* set loss\.sub_vocab_size=0",
        ),
        (
            {"trainer.patience": 3, "trainer.validate_every": 0},
            r"^trainer\.patience=3 with trainer\.validate_every=0: tau is never measured",
        ),
        (
            {"loss.sub_vocab_size": 5, "loss.tail_sample_size": 0},
            r"loss\.tail_sample_size=0 with loss\.sub_vocab_size=5: must be at least 1",
        ),
        (
            {"trainer.dtype": "bfloat16", "deepspeed.zero_stage": 0},
            r"trainer\.dtype=bfloat16 with deepspeed\.zero_stage=0",
        ),
        (
            {"deepspeed.offload": "optimizer", "deepspeed.zero_stage": 0},
            r"^deepspeed\.offload=optimizer with deepspeed\.zero_stage=0: .*zero_stage=1 or",
        ),
        (
            {"trainer.optimizer": "muon", "deepspeed.offload": "optimizer"},
            r"^trainer\.optimizer=muon with deepspeed\.offload=optimizer: ",
        ),
        (
            {"deepspeed.offload": "all", "deepspeed.zero_stage": 2},
            r"^deepspeed\.offload=all with deepspeed\.zero_stage=2: .*zero_stage=3 or",
        ),
        (
            {
                "trainer.schedule": "wsd",
                "trainer.warmup_share": 0.5,
                "trainer.decay_share": 0.6,
            },
            "exceed the whole run",
        ),
        (
            {"data.sources": ["sharegpt", "mtbench"]},
            r"data\.sources contains mtbench, on which validate\.sets measures",
        ),
        (
            {"validate.temperature": 0.7, "runtime.verify": "greedy"},
            r"exact at temperature 0 only",
        ),
        (
            {"validate.turns": 2, "validate.sets": ["gsm8k"]},
            r"validate\.turns=2 .* only mtbench has second turns",
        ),
        (
            {"generate.head": "h", "generate.draft_model": "m"},
            r"generate\.head=h with generate\.draft_model: one of them drafts",
        ),
        ({"runtime.schedule": "draft_target"}, r"schedule=draft_target: name the model"),
        (
            {"head.init": "nowhere"},
            r"head\.init='nowhere': must be random, target_norm, last_layer",
        ),
        (
            {"head.init": "native", "head.decoder": "llama"},
            r"head\.init=native with head\.decoder=llama: .*; set head\.decoder=target",
        ),
        (
            {"export.format": "eagle3", "export.copy_to": "there"},
            r"export\.copy_to='there' with export\.format=eagle3: .*format=deepseek",
        ),
        (
            {"head.kind": "eagle3"},
            r"head\.first_embedding_mask=true with head\.kind=eagle3: .* has false; .* head=eagle3",
        ),
        (
            {"head.layer_ids": [2, 4]},
            r"head\.layer_ids=\[2, 4\] with head\.kind=mtp: .*; choose head=eagle3",
        ),
        (
            {"head.draft_vocab_size": 9},
            r"head\.draft_vocab_size=9 with head\.kind=mtp: only the head of EAGLE-3",
        ),
        (
            {"head.num_blocks": 3},
            r"head\.num_blocks=3 with head\.kind=mtp: only the head of Medusa .*head=medusa",
        ),
        (
            {"head.num_layers": 0},
            r"head\.num_layers=0 with head\.kind=mtp: it has one decoder layer or",
        ),
        (
            {"head.init": "zero"},
            r"head\.init=zero with head\.kind=mtp: use random, target_norm or last_layer",
        ),
        (
            {"head.kind": "medusa"},
            r"head\.num_layers=1 with head\.kind=medusa: .* has 0; .* head=medusa",
        ),
        (
            {"head.kind": "eagle"},
            r"head\.recycle=post_norm with head\.kind=eagle: .* has pre_norm; .* head=eagle",
        ),
        (
            {"runtime.schedule": "fixed_tree", "generate.draft_layers": [1]},
            r"schedule=fixed_tree with generate\.draft_model .* drafts with a head",
        ),
        (
            {"runtime.schedule": "fixed_tree", "runtime.draft_length": "measured"},
            r"draft_length=measured with runtime\.schedule=fixed_tree",
        ),
        ({"generate.draft_layers": [2, 1]}, r"draft_layers=\[2, 1\]: .*increasing order"),
        ({"generate.draft_layers": [-1, 1]}, r"draft_layers=\[-1, 1\]: name layers from 0"),
        ({"runtime.num_draft_tokens": 3}, r"num_draft_tokens=3: leave it at 0; .* validate\.k"),
        (
            {"runtime.draft_mode": "sampled", "runtime.verify": "keyed"},
            r"runtime\.draft_mode=sampled with runtime\.verify=keyed",
        ),
        (
            {"runtime.schedule": "fixed_tree", "runtime.tree_rates": [0.2, 0.5]},
            r"runtime\.tree_rates=\[0\.2, 0\.5\]: .* none above the one before it",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    load_config(_with())
    with pytest.raises(ConfigError, match=message):
        load_config(_with(*changes.items()))


def test_every_numeric_rule_names_a_key_that_exists() -> None:
    config = load_config(MINIMAL)
    for paths, is_allowed, _ in rules.RANGES:
        for path in paths:
            assert is_allowed(get_field(config, path)), f"{path}: its default breaks its own rule"


def test_every_numeric_key_has_a_rule() -> None:
    """A new number gets a range, or is listed here with the place that checks it."""
    checked_elsewhere = {"deepspeed.zero_stage", "head.num_layers"}  # choices
    ruled = {path for paths, _, _ in rules.RANGES for path in paths} | checked_elsewhere
    config = load_config(MINIMAL)
    numbers = {
        key
        for key in known_keys()
        if type(get_field(config, key)) in (int, float)
        and not key.startswith(("runtime.", "data."))  # these sections check themselves
    }
    assert numbers - ruled == set()


def test_dumped_configuration_loads_back_equal(tmp_path: Path) -> None:
    config = load_config(_with(("data.chat_template_kwargs", {"a": "b"}), ("loss.step_decay", 0.5)))
    assert load_config(yaml.safe_load(dump_config(config))) == config


def test_config_files_state_the_dataclass_defaults_key_by_key() -> None:
    """The files document every key; a key missing there could not be overridden either."""
    files = {
        "target": "local",
        "data": "default",
        "head": "mtp",
        "loss": "full",
        "trainer": "default",
        "deepspeed": "zero1",
        "features": "bf16",
        "runtime": "cpu",
        "validate": "default",
        "report": "default",
    }
    chosen_by_the_user = {"target.path", "data.sources"}
    raw = {
        section: yaml.safe_load((CONF_DIR / section / f"{name}.yaml").read_text())
        for section, name in files.items()
    }
    leaves = [
        key
        for key in known_keys()
        if key.partition(".")[0] in files
        and not dataclasses.is_dataclass(get_field(load_config(MINIMAL), key))
    ]
    stated = {key: _dig(raw, key) for key in leaves}
    assert [key for key, value in stated.items() if value is _ABSENT] == []
    raw["run"], raw["target"]["path"], raw["data"]["sources"] = {"name": "mine"}, "/m", ["x"]
    from_files, defaults = load_config(raw), load_config(MINIMAL)
    different = [k for k in leaves if get_field(from_files, k) != get_field(defaults, k)]
    assert set(different) <= chosen_by_the_user


def test_the_eagle_group_is_what_the_contract_calls_eagle() -> None:
    raw = yaml.safe_load((CONF_DIR / "head" / "eagle.yaml").read_text())
    config = load_config(_with(("head", raw)))
    assert dataclasses.asdict(config.head.norms) == vars(EAGLE_FIELDS["norms"])
    for field in ("concat", "recycle", "first_embedding_mask"):
        assert getattr(config.head, field) == EAGLE_FIELDS[field]


def test_the_eagle3_group_is_what_the_contract_calls_eagle3() -> None:
    raw = yaml.safe_load((CONF_DIR / "head" / "eagle3.yaml").read_text())
    config = load_config(_with(("head", raw), ("loss", {"hidden_weight": 0})))
    assert dataclasses.asdict(config.head.norms) == vars(EAGLE3_FIELDS["norms"])
    for field in ("concat", "first_embedding_mask", "projection_bias", "num_layers"):
        assert getattr(config.head, field) == EAGLE3_FIELDS[field]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({}, r"loss\.hidden_weight=0\.1, .* head\.kind=eagle3: .*; choose loss=eagle3"),
        ({"hidden_weight": 0, "logit_weight": 0}, r"loss\."),
        (
            {"hidden_weight": 0, "sub_vocab_size": 9},
            r"loss\.sub_vocab_size=9 .*head\.draft_vocab_size",
        ),
        ({"hidden_weight": 0, "vocab_chunk": 9}, r"loss\.vocab_chunk=9 .* lower loss\.row_chunk"),
        (
            {"hidden_weight": 0, "own_tokens": True, "num_unroll_steps": 2},
            r"loss\.own_tokens=true with head\.kind=eagle3",
        ),
    ],
)
def test_a_head_with_its_own_lm_head_wants_its_own_loss(loss: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load((CONF_DIR / "head" / "eagle3.yaml").read_text())
    with pytest.raises(ConfigError, match=message):
        load_config(_with(("head", raw), ("loss", loss)))


@pytest.mark.parametrize("kind", ["forward_kl", "lk_lambda"])
def test_a_divergence_over_a_list_of_ids_is_refused(kind: str) -> None:
    raw = yaml.safe_load((CONF_DIR / "head" / "eagle3.yaml").read_text())
    settings = (("head", raw), ("loss", {"hidden_weight": 0, "kind": kind}))
    load_config(_with(*settings))
    with pytest.raises(
        ConfigError, match=rf"loss\.kind={kind} with head\.draft_vocab_size=9: .*tv"
    ):
        load_config(_with(*settings, ("head.draft_vocab_size", 9)))
    for other in ("reverse_kl", "tv", "lk_alpha", "expected_length"):
        load_config(_with(*settings, ("head.draft_vocab_size", 9), ("loss.kind", other)))


def test_lm_heads_of_medusas_own_want_a_loss_over_all_tokens() -> None:
    raw = yaml.safe_load((CONF_DIR / "head" / "medusa.yaml").read_text()) | {"own_lm_heads": True}
    settings = (("head", raw), ("loss", {"num_unroll_steps": 3, "hidden_weight": 0}))
    load_config(_with(*settings))
    with pytest.raises(ConfigError, match=r"loss\.sub_vocab_size=9 with head\.own_lm_heads=true"):
        load_config(_with(*settings, ("loss.sub_vocab_size", 9)))
    with pytest.raises(ConfigError, match=r"head\.own_lm_heads=true: .* choose loss=medusa"):
        load_config(_with(settings[0], ("loss", {"num_unroll_steps": 3})))
    with pytest.raises(ConfigError, match=r"head\.own_lm_heads=true with head\.kind=mtp: only"):
        load_config(_with(("head.own_lm_heads", True)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deepspeed.zero_stage": 3}, r"trainer\.compile=true with deepspeed\.zero_stage=3: .*=2"),
        ({"trainer.sequence_parallel": 2}, r"compile=true with trainer\.sequence_parallel=2"),
    ],
)
def test_what_is_gathered_inside_a_layer_is_not_compiled(
    settings: dict[str, Any], message: str
) -> None:
    load_config(_with(("trainer.compile", True)))
    with pytest.raises(ConfigError, match=message):
        load_config(_with(("trainer.compile", True), *settings.items()))


def test_the_medusa_group_is_what_the_contract_calls_medusa() -> None:
    raw = {
        name: yaml.safe_load((CONF_DIR / name / "medusa.yaml").read_text())
        for name in ("head", "loss")
    }
    raw["loss"].pop("defaults")
    config = load_config(_with(*raw.items()))
    assert dataclasses.asdict(config.head.norms) == vars(MEDUSA_FIELDS["norms"])
    for field in ("concat", "recycle", "first_embedding_mask", "num_layers"):
        assert getattr(config.head, field) == MEDUSA_FIELDS[field]
    assert config.head.num_blocks == config.loss.num_unroll_steps == config.validate.k


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss.num_unroll_steps": 2},
            r"num_unroll_steps=2 with head\.num_blocks=3: .*=medusa",
        ),
        ({"head.num_blocks": 0}, r"head\.num_blocks=0 with head\.kind=medusa: .* at least 1"),
        ({"loss.own_tokens": True}, r"loss\.own_tokens=true with head\.kind=medusa"),
        ({"validate.k": 4}, r"validate\.k=4 with head\.num_blocks=3: .*lower validate\.k"),
        ({"generate.k": 4}, r"generate\.k=4 with head\.num_blocks=3"),
        ({"head.init": "last_layer"}, r"head\.init=last_layer with .*medusa: use zero or random"),
    ],
)
def test_blocks_go_with_the_loss_and_with_what_is_drafted(
    changes: dict[str, Any], message: str
) -> None:
    raw = yaml.safe_load((CONF_DIR / "head" / "medusa.yaml").read_text())
    settings = {"head": raw, "loss": {"num_unroll_steps": 3}}
    load_config(_with(*settings.items()))
    with pytest.raises(ConfigError, match=message):
        load_config(_with(*settings.items(), *changes.items()))


_ABSENT = object()


def _dig(raw: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(raw, dict) or part not in raw:
            return _ABSENT
        raw = raw[part]
    return raw


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "vllm"}, r"^engine\.kind=vllm: give one of engine\.python"),
        (
            {"kind": "vllm", "python": "p", "url": "http://u"},
            r"not engine\.python=p and engine\.url=http://u$",
        ),
        ({"kind": "vllm", "url": "localhost:80"}, r"^engine\.url='localhost:80': expected an addr"),
        ({"kind": "vllm", "url": "http://a:b@c"}, r"^engine\.url: no user, password or query"),
        ({"url": "http://a:b@c"}, r"^engine\.url: no user, password or query in the address; put"),
        ({"kind": "vllm", "python": "p", "k": [0]}, r"^engine\.k=\[0\]: name numbers"),
        ({"kind": "vllm", "python": "p", "sets": ["x"]}, r"^engine\.sets: x is unknown; allowed"),
        ({"kind": "vllm", "python": "p", "sets": []}, r"^engine\.sets=\[\]: name at least one"),
        ({"kind": "sglang"}, r"^engine\.kind=sglang: allowed are none, vllm"),
        ({"max_running": 0}, r"^engine\.max_running=0: must be at least 1$"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_refused(section: dict[str, Any], message: str) -> None:
    raw = {"run": {"name": "x"}, "target": {"path": "m"}, "data": {}, "engine": section}
    with pytest.raises(ConfigError, match=message):
        load_config(raw)


def test_p6_wants_an_engine() -> None:
    raw = {"run": {"name": "x"}, "target": {"path": "m"}, "data": {}}
    rungs = {"validate": {"rungs": ["P6"]}}
    with pytest.raises(ConfigError, match=r"say which, as in engine=vllm"):
        load_config({**raw, **rungs})
    load_config({**raw, **rungs, "engine": {"kind": "vllm", "url": "http://localhost:8000"}})


def test_the_engines_final_evaluation_may_not_be_trained_on() -> None:
    raw = {"run": {"name": "x"}, "target": {"path": "m"}, "data": {"sources": ["gsm8k"]}}
    engine = {"kind": "vllm", "python": "p"}
    with pytest.raises(ConfigError, match=r"^data\.sources contains gsm8k, on which engine\.sets"):
        load_config({**raw, "engine": engine})

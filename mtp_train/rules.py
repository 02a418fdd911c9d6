"""What a configuration must hold to be run: ranges, and settings that exclude each other.

The sections `data` and `runtime` have rules of their own, checked when they are built. Imports
nothing heavy, so that a mistake costs no waiting.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from data_prep.addresses import check_url, check_variable
from data_prep.builtin import BUILTIN_SETS
from mtp_train.config import Config, get_field
from mtp_train.errors import ConfigError
from mtp_train.head_rules import check_blocks, check_head, check_own_head

Number = int | float
Rule = tuple[tuple[str, ...], Callable[[Number], bool], str]

RANGES: tuple[Rule, ...] = (
    (
        (
            "features.shard_tokens",
            "features.max_batch_tokens",
            "features.tensor_parallel",
            "features.p0_samples_per_shard",
            "features.p0_rows_per_sample",
            "loss.num_unroll_steps",
            "loss.row_chunk",
            "trainer.tokens_per_step",
            "trainer.gradient_accumulation",
            "trainer.sequence_parallel",
            "trainer.epochs",
            "trainer.checkpoint_every",
            "trainer.keep_last",
            "trainer.log_every",
            "trainer.max_nonfinite_run",
            "validate.k",
            "validate.num_prompts",
            "validate.max_tokens",
            "validate.min_drafts",
            "engine.exact_prompts",
            "engine.exact_tokens",
            "engine.max_running",
            "engine.timeout_s",
            "generate.max_tokens",
            "plan.row_tokens",
            "plan.answer_tokens",
            "preflight.num_prompts",
            "preflight.max_prompt_tokens",
            "preflight.max_tokens",
            "preflight.steps",
            "check_render.rows",
            "hot_vocab.speed_tokens",
            "hot_vocab.speed_repeats",
            "bench.num_prompts",
            "bench.max_tokens",
            "bench.rounds",
        ),
        lambda value: value >= 1,
        "must be at least 1",
    ),
    (
        (
            "seed",
            "head.draft_vocab_size",
            "head.num_blocks",
            "loss.hidden_weight",
            "loss.logit_weight",
            "loss.sub_vocab_size",
            "loss.tail_sample_size",
            "loss.lk_eta",
            "loss.vocab_chunk",
            "export.max_length",
            "export.max_file_gb",
            "bench.warm_up_tokens",
            "report.max_samples",
            "trainer.max_steps",
            "trainer.max_tokens",
            "trainer.validate_every",
            "trainer.patience",
            "trainer.feature_noise",
            "trainer.weight_decay",
            "validate.temperature",
            "validate.max_prompts",
            "validate.max_further_prompts",
            "generate.k",
            "compare.k",
            "hot_vocab.speed_prompts",
            "generate.temperature",
        ),
        lambda value: value >= 0,
        "must not be negative",
    ),
    (
        ("validate.turns",),
        lambda value: value in (1, 2),
        "must be 1 or 2",
    ),
    (
        (
            "loss.step_decay",
            "trainer.learning_rate",
            "trainer.clip_norm",
            "preflight.learning_rate",
            "preflight.min_rate",
            "features.p0_max_logprob_gap",
            "features.p0_max_kl",
        ),
        lambda value: value > 0,
        "must be greater than 0",
    ),
    (
        (
            "trainer.warmup_share",
            "validate.max_loss",
            "trainer.decay_share",
            "trainer.min_lr_share",
            "features.max_nonfinite_share",
            "features.min_free_disk_share",
        ),
        lambda value: 0 <= value < 1,
        "must be a share: 0 <= value < 1",
    ),
    (("bench.min_equal",), lambda value: 0 <= value <= 1, "must be a share: 0 <= value <= 1"),
)

_EVALUATION_SETS = tuple(name for name, entry in BUILTIN_SETS.items() if entry.evaluation_only)
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+,-]*")


def check_config(config: Config) -> None:
    """Ranges, and the combinations that cannot work. Raises ``ValueError``, a :class:`ConfigError`
    where the rule is not of a section of its own.
    """
    for paths, is_allowed, text in RANGES:
        for path in paths:
            value = get_field(config, path)
            if not is_allowed(value):
                raise ConfigError(f"{path}={value}: {text}")
    for check in _COMBINATIONS:
        check(config)


def _check_run_name(config: Config) -> None:
    if not _RUN_NAME.fullmatch(config.run.name):
        raise ConfigError(
            f"run.name={config.run.name!r}: must be one plain folder name "
            "(letters, digits and . _ - = + , and not starting with a dot)"
        )


def _check_data(config: Config) -> None:
    _check_not_trained_on(config, "validate.sets")


def _check_regeneration(config: Config) -> None:
    regenerate = config.data.regenerate
    if regenerate.capture_features and config.features.source != "runtime":
        raise ConfigError(
            f"features.source={config.features.source} with data.regenerate.capture_features=true: "
            "captured features always come from the runtime; set features.source=runtime"
        )
    if regenerate.enabled and config.data.format == "tokenized":
        raise ConfigError(
            "data.format=tokenized with data.regenerate.enabled=true: tokenised rows have no turns "
            "that could be answered again"
        )
    is_here = regenerate.enabled and not regenerate.url
    if is_here and config.data.max_tokens > config.runtime.max_model_len:
        raise ConfigError(
            f"data.max_tokens={config.data.max_tokens} with data.regenerate.enabled=true: rows are "
            f"decoded within runtime.max_model_len={config.runtime.max_model_len}; lower the one "
            "or raise the other"
        )


def _check_rendering(config: Config) -> None:
    settings = config.check_render
    if settings.url:
        check_url(settings.url, "check_render.url", key_field="check_render.api_key_env")
    check_variable(settings.api_key_env, "check_render.api_key_env")


def _check_plan(config: Config) -> None:
    plan = config.plan
    if plan.answer_tokens > plan.row_tokens - 3:
        raise ConfigError(
            f"plan.answer_tokens={plan.answer_tokens} with plan.row_tokens={plan.row_tokens}: a "
            "row is a prompt of at least three tokens and the answer"
        )
    if plan.calibrate and plan.hardware != "here":
        raise ConfigError(
            f"plan.hardware={plan.hardware} with plan.calibrate=true: this machine is measured; "
            "set plan.hardware=here"
        )


def _check_hot_vocab(config: Config) -> None:
    sizes = config.hot_vocab.sizes
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"hot_vocab.sizes={list(sizes)}: name numbers of ids, each below the target's "
            "vocabulary, as in hot_vocab.sizes=[4096,8192]"
        )


def _check_bench(config: Config) -> None:
    settings = config.bench
    for url in settings.url:
        check_url(url, "bench.url", key_field="engine.api_key_env")
    if settings.url and settings.heads and len(settings.heads) != len(settings.url):
        raise ConfigError(
            f"bench.heads={list(settings.heads)} with bench.url={list(settings.url)}: name what "
            "each server serves, in the same order, or leave bench.heads out"
        )
    for name in ("heads", "url", "k", "concurrency", "prompts"):
        values = getattr(settings, name)
        if len(set(values)) < len(values):
            raise ConfigError(f"bench.{name}={list(values)}: each may be named once")
    for name in ("k", "concurrency"):
        values = getattr(settings, name)
        if not values or min(values) < 1:
            raise ConfigError(f"bench.{name}={list(values)}: name numbers from 1")
    if not settings.prompts:
        raise ConfigError("bench.prompts=[]: name evaluation sets, or files with prompts")


def _check_features(config: Config) -> None:
    if not config.features.p0_references:
        raise ConfigError(
            "features.p0_references=[]: name decode, huggingface or both; without a reference "
            "nothing checks that the stored states are the target's"
        )
    width, source = config.features.tensor_parallel, config.features.source
    if width > 1 and source != "runtime":
        raise ConfigError(
            f"features.tensor_parallel={width} with features.source={source}: only the runtime "
            "spreads a target over ranks; set features.source=runtime (vllm: "
            "+engine.args.tensor_parallel_size)"
        )


def require_chain(config: Config, stage: str) -> None:
    """Refuse other schedules where figures are those of the chain that serving engines run."""
    name = config.runtime.schedule
    if name not in ("auto", "mtp"):
        raise ConfigError(
            f"runtime.schedule={name}: mtp {stage} works with a head's chain, as serving engines "
            "do; leave it at auto here, and try other schedules with mtp generate"
        )


def _check_loss(config: Config) -> None:
    if config.loss.hidden_weight == 0 and config.loss.logit_weight == 0:
        raise ConfigError("loss.hidden_weight=0 with loss.logit_weight=0: nothing to train on")
    if config.loss.kind != "soft_ce" and not config.loss.logit_weight:
        raise ConfigError(
            f"loss.kind={config.loss.kind} with loss.logit_weight=0: the loss between "
            "distributions has no weight; raise it, or leave loss.kind at soft_ce"
        )
    if config.loss.kind == "reverse_kl" and config.loss.sub_vocab_size:
        raise ConfigError(
            f"loss.kind=reverse_kl with loss.sub_vocab_size={config.loss.sub_vocab_size}: it would "
            "reward mass outside of the sub-vocabulary, where ids are not told apart; set "
            "loss.sub_vocab_size=0 or choose another loss.kind"
        )
    if config.loss.sub_vocab_size and not config.loss.tail_sample_size:
        raise ConfigError(
            f"loss.tail_sample_size=0 with loss.sub_vocab_size={config.loss.sub_vocab_size}: must "
            "be at least 1, or nothing holds the logits outside of the sub-vocabulary down"
        )


def _check_trainer(config: Config) -> None:
    trainer = config.trainer
    if not all(0 <= beta < 1 for beta in trainer.betas):
        raise ConfigError(f"trainer.betas={list(trainer.betas)}: each must be in [0, 1)")
    if trainer.schedule == "wsd" and trainer.warmup_share + trainer.decay_share > 1:
        raise ConfigError(
            f"trainer.warmup_share={trainer.warmup_share} with trainer.decay_share="
            f"{trainer.decay_share}: together they exceed the whole run"
        )
    if trainer.patience and not trainer.validate_every:
        raise ConfigError(
            f"trainer.patience={trainer.patience} with trainer.validate_every=0: tau is never "
            "measured; set trainer.validate_every to a number of steps, or trainer.patience=0"
        )
    if trainer.dtype == "bfloat16" and config.deepspeed.zero_stage == 0:
        raise ConfigError(
            "trainer.dtype=bfloat16 with deepspeed.zero_stage=0: bf16 training needs the fp32 "
            "gradients of stage 1 or above; set deepspeed.zero_stage=1 or trainer.dtype=float32"
        )
    _check_compiled(config)
    _check_offload(config)


def _check_compiled(config: Config) -> None:
    if not config.trainer.compile:
        return
    for path, value, allowed in (
        ("deepspeed.zero_stage", config.deepspeed.zero_stage, (0, 1, 2)),
        ("trainer.sequence_parallel", config.trainer.sequence_parallel, (1,)),
    ):
        if value not in allowed:
            raise ConfigError(
                f"trainer.compile=true with {path}={value}: weights and rows that are gathered in "
                f"the middle of a layer are not compiled; set {path}={allowed[-1]} or "
                "trainer.compile=false"
            )
    if config.head.kind == "medusa":
        raise ConfigError(
            "trainer.compile=true with head.kind=medusa: its blocks are one product each, there is "
            "nothing to compile; set trainer.compile=false"
        )


def _check_offload(config: Config) -> None:
    deepspeed = config.deepspeed
    needed = {"none": 0, "optimizer": 1, "all": 3}[deepspeed.offload]
    if deepspeed.zero_stage < needed:
        raise ConfigError(
            f"deepspeed.offload={deepspeed.offload} with deepspeed.zero_stage="
            f"{deepspeed.zero_stage}: DeepSpeed offloads what a stage shares out over the ranks, "
            f"the optimiser's state from stage 1 on, weights at stage 3; set deepspeed.zero_stage="
            f"{needed} or deepspeed.offload=none"
        )
    if deepspeed.offload != "none" and config.trainer.optimizer == "muon":
        raise ConfigError(
            f"trainer.optimizer=muon with deepspeed.offload={deepspeed.offload}: Muon puts each "
            "matrix together over the ranks, on the device; set trainer.optimizer=adamw or "
            "deepspeed.offload=none"
        )


def _check_validation(config: Config) -> None:
    validate, runtime = config.validate, config.runtime
    if runtime.num_draft_tokens:
        raise ConfigError(
            f"runtime.num_draft_tokens={runtime.num_draft_tokens}: leave it at 0; the number of "
            "drafted tokens is validate.k, and everything else decodes without drafts"
        )
    _check_sets(config)
    if not validate.rungs:
        raise ConfigError("validate.rungs=[]: name at least one of P0, P1, P2, P3, P4, P5, P6")
    for rung in validate.rungs:
        if rung not in ("P0", "P1", "P2", "P3", "P4", "P5", "P6"):
            raise ConfigError(f"validate.rungs: {rung} is unknown; allowed are P0 to P6")
    if "P6" in validate.rungs and config.engine.kind == "none":
        raise ConfigError(
            "validate.rungs names P6, which asks a serving engine; say which, as in engine=vllm "
            "engine.python=.venv-vllm/bin/python"
        )
    for key in ("validate.temperature", "generate.temperature"):
        temperature = get_field(config, key)
        if temperature > 0 and runtime.verify == "greedy":
            raise ConfigError(
                f"{key}={temperature} with runtime.verify=greedy: greedy verification is exact at "
                "temperature 0 only; use runtime.verify=keyed or rejection"
            )


def _check_generate(config: Config) -> None:
    settings = config.generate
    has_model = settings.draft_model or settings.draft_layers
    if settings.head and has_model:
        name = "draft_model" if settings.draft_model else "draft_layers"
        raise ConfigError(
            f"generate.head={settings.head} with generate.{name}: one of them drafts; leave the "
            "other out"
        )
    schedule = config.runtime.schedule
    if schedule == "draft_target" and not has_model:
        raise ConfigError(
            "runtime.schedule=draft_target: name the model that drafts, generate.draft_model or "
            "generate.draft_layers; with mtp generate only"
        )
    if schedule not in ("auto", "draft_target") and has_model:
        raise ConfigError(
            f"runtime.schedule={schedule} with generate.draft_model or generate.draft_layers: it "
            "drafts with a head; leave it at auto"
        )
    layers = settings.draft_layers
    if list(layers) != sorted({layer for layer in layers if layer >= 0}):
        raise ConfigError(
            f"generate.draft_layers={list(layers)}: name layers from 0, each once, in increasing "
            "order"
        )


def _check_attention(config: Config) -> None:
    runtime, target = config.runtime, config.target
    if target.device == "cpu" and runtime.attention == "flashinfer":
        raise ConfigError(
            "runtime.attention=flashinfer with target.device=cpu: it needs a GPU; use "
            "runtime.attention=auto"
        )
    if runtime.attention == "sdpa" and runtime.attention_kernel != "auto":
        raise ConfigError(
            f"runtime.attention_kernel={runtime.attention_kernel} with runtime.attention=sdpa: it "
            "names a kernel of FlashInfer; use runtime.attention=flashinfer or "
            "runtime.attention_kernel=auto"
        )
    if runtime.cuda_graphs and (target.device == "cpu" or runtime.attention == "sdpa"):
        raise ConfigError(
            f"runtime.cuda_graphs=true with target.device={target.device} and runtime.attention="
            f"{runtime.attention}: only FlashInfer's attention on a GPU is recorded"
        )


def _check_engine(config: Config) -> None:
    engine = config.engine
    if engine.url:
        check_url(engine.url, "engine.url", key_field="engine.api_key_env")
    check_variable(engine.api_key_env, "engine.api_key_env")
    if engine.kind == "none":
        return
    if bool(engine.python) == bool(engine.url):
        both = f"engine.python={engine.python} and engine.url={engine.url}"
        raise ConfigError(
            f"engine.kind={engine.kind}: give one of engine.python (the interpreter of the "
            "environment that it is installed in) and engine.url (a server that runs already)"
            + (f", not {both}" if engine.python else "")
        )
    if not engine.k or min(engine.k) < 1:
        raise ConfigError(f"engine.k={list(engine.k)}: name numbers of drafted tokens, from 1")
    _check_known_sets(config, "engine.sets")
    _check_not_trained_on(config, "engine.sets")


def _check_export(config: Config) -> None:
    export = config.export
    if export.copy_to and export.format not in ("mimo", "deepseek"):
        raise ConfigError(
            f"export.copy_to={export.copy_to!r} with export.format={export.format}: a target can "
            "hold MTP weights of its own alone; use export.format=deepseek, or mimo for a MiMo "
            "target"
        )


def _check_known_sets(config: Config, path: str) -> None:
    names = get_field(config, path)
    known = ", ".join(_EVALUATION_SETS)
    if not names:
        raise ConfigError(f"{path}=[]: name at least one of {known}")
    for name in names:
        if name not in _EVALUATION_SETS:
            raise ConfigError(f"{path}: {name} is unknown; allowed are {known}")


def _check_not_trained_on(config: Config, path: str) -> None:
    measured = sorted(set(config.data.sources) & set(get_field(config, path)))
    if measured:
        raise ConfigError(
            f"data.sources contains {', '.join(measured)}, on which {path} measures: a head "
            "must not be trained on its own final evaluation; change one of the two"
        )


def _check_sets(config: Config) -> None:
    validate = config.validate
    _check_known_sets(config, "validate.sets")
    if len(set(validate.sets)) < len(validate.sets):
        raise ConfigError(f"validate.sets={list(validate.sets)}: each set may be named once")
    two = [name for name in _EVALUATION_SETS if BUILTIN_SETS[name].has_second_turns]
    if validate.turns == 2 and not set(two) & set(validate.sets):
        raise ConfigError(
            f"validate.turns=2 with validate.sets={list(validate.sets)}: only {', '.join(two)} has "
            "second turns; name it or set validate.turns=1"
        )


def _check_files(config: Config) -> None:
    template = config.data.chat_template
    if template and not Path(template).is_file():
        raise ConfigError(f"data.chat_template={template}: no such file")
    if config.data.path and not Path(config.data.path).is_dir():
        raise ConfigError(f"data.path={config.data.path}: no such directory")


_COMBINATIONS: tuple[Callable[[Config], None], ...] = (
    _check_run_name,
    check_head,
    _check_data,
    _check_regeneration,
    _check_rendering,
    _check_plan,
    _check_hot_vocab,
    _check_bench,
    _check_features,
    _check_loss,
    check_own_head,
    check_blocks,
    _check_trainer,
    _check_validation,
    _check_generate,
    _check_attention,
    _check_export,
    _check_engine,
    _check_files,
)

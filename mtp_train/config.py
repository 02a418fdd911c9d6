"""Frozen configuration of every command; ``conf/`` is validated into it once, before any heavy
work.

Unknown key, wrong type or impossible combination: one ``ValueError`` that names the field, the
value and
what is allowed. Nothing reads raw dictionaries or environment variables after that.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from data_prep.config import DataConfig
from runtime.config import EngineConfig

Codec = Literal["bf16", "fp8_e4m3", "fp32"]
# Of head.init; anything else is a directory.
BUILT_IN_INITS = ("random", "target_norm", "last_layer", "zero", "native")
LossKind = Literal[
    "soft_ce", "forward_kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda", "expected_length"
]


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives: every stage writes below ``root/name`` and can be started again
    there.
    """

    name: str
    root: str = "runs"
    group: str = ""  # runs that belong together, as in wandb; a sweep's members get its name


@dataclass(frozen=True)
class TargetConfig:
    """The target model: a local Hugging Face directory, a ``.gguf`` file, or a built-in name."""

    path: str
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False
    cache_dir: str = ""  # de-quantised GGUF targets; empty = ~/.cache/mtp-train
    # what its linears have to be stored in; heads are never quantised
    quantization: Literal["any", "none", "int8", "fp8"] = "any"


@dataclass(frozen=True)
class HeadNorms:
    """Which RMSNorms the head has."""

    enorm: bool = True  # of the embedding
    hnorm: bool = True  # of the target's hidden state
    input: bool = True  # before attention
    post_attention: bool = True  # before the MLP
    final: bool = True


@dataclass(frozen=True)
class HeadConfig:
    """The head to train. Dimensions come from the target."""

    # all but the first as published: little is open
    kind: Literal["mtp", "eagle", "eagle3", "medusa"] = "mtp"
    num_layers: Literal[0, 1, 2] = 1  # decoder layers behind the projection; 0: medusa
    # mtp: attention and MLP of the kind of the target's last layer, or a plain Llama layer
    decoder: Literal["target", "llama"] = "target"
    # random, target_norm, last_layer, zero (medusa), native (the target's own MTP weights), a head
    # directory to go on from, or the base checkpoint of a fine-tune that has lost its MTP weights
    init: str = "random"
    concat: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    recycle: Literal["post_norm", "pre_norm"] = "post_norm"
    first_embedding_mask: bool = True
    projection_bias: bool = False
    norms: HeadNorms = HeadNorms()
    layer_ids: tuple[int, ...] = ()  # eagle3: k of the S_k it reads; () = 2, N // 2, N - 3
    fusion_norm: Literal["none", "each", "joined"] = "none"  # eagle3: of the S_k before fc
    norm_before_residual: bool = False  # eagle3: the residual is the normed input
    draft_vocab_size: int = 0  # eagle3: the most frequent answer tokens; 0 = all
    num_blocks: int = 0  # medusa: one per token that it can draft
    own_lm_heads: bool = False  # medusa: an lm_head per block, as the published heads have


@dataclass(frozen=True)
class LossConfig:
    """smooth-L1(hidden) + a loss between distributions, unrolled over K steps with weights
    beta^k.
    """

    kind: LossKind = "soft_ce"
    lk_eta: float = 3.0  # lk_lambda: KL weighs exp(-lk_eta * acceptance), total variation the rest
    hidden_weight: float = 0.1
    logit_weight: float = 1.0
    num_unroll_steps: int = 1
    step_decay: float = 1.0  # beta
    own_tokens: bool = False  # steps behind the first embed the head's own drafts
    sub_vocab_size: int = (
        0  # 0 = full vocabulary; else the n most frequent answer tokens, tail mass kept
    )
    tail_sample_size: int = 1024  # ids outside of the sub-vocabulary drawn for every step
    row_chunk: int = 256  # rows whose logits exist at once
    vocab_chunk: int = 0  # 0 = whole rows; else columns at once (less memory, logits made twice)


@dataclass(frozen=True)
class TrainerConfig:
    """Optimisation. Tokens are packed rows of the feature store."""

    epochs: int = 1  # passes over the data, where max_steps is 0
    max_steps: int = 0  # 0 = epochs decide; else exactly so many, epochs repeated as needed
    max_tokens: int = 0  # of the store, a random part of it; 0 = all
    tokens_per_step: int = 4096  # per optimiser step, over all ranks and accumulation
    gradient_accumulation: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    warmup_share: float = 0.05
    decay_share: float = 0.2  # wsd: share of the steps spent decaying
    min_lr_share: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    attention: Literal["auto", "blockwise", "flash", "flex"] = "auto"
    compile: bool = False  # torch.compile of the head's layers but for attention
    activation_checkpointing: bool = False  # compute activations twice instead of keeping them
    sequence_parallel: int = 1  # ranks that share out the rows of one micro-batch (Ulysses)
    checkpoint_every: int = 200
    keep_last: int = 2
    validate_every: int = 200
    log_every: int = 10
    max_nonfinite_run: int = 8
    feature_noise: float = 0.0  # half-width of uniform noise on hidden inputs, in each row's RMS
    patience: int = 0  # validations in a row without a higher tau that end the run; 0 = never
    wandb: Literal["disabled", "offline", "online"] = "offline"
    tensorboard: bool = True


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What of DeepSpeed the user may choose; everything else is derived."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    # in the host's memory: the optimiser's state and step; all = weights at rest too (stage 3)
    offload: Literal["none", "optimizer", "all"] = "none"


@dataclass(frozen=True)
class FeaturesConfig:
    """The feature store. ``path`` empty = ``runs/<name>/features``; a sweep shares one by
    setting it.
    """

    path: str = ""
    source: Literal["runtime", "huggingface", "vllm"] = "runtime"
    codec: Codec = "bf16"
    shard_tokens: int = 65536
    max_batch_tokens: int = 2048
    tensor_parallel: int = 1  # ranks that share one copy of the target during the dump
    p0_samples_per_shard: int = 2
    p0_rows_per_sample: int = 32  # the last rows of each sample; decoded step by step
    p0_references: tuple[Literal["decode", "huggingface"], ...] = ("decode", "huggingface")
    p0_max_logprob_gap: float = 1e-4  # fp32, before the codec
    p0_max_kl: float = 0.01  # nats, after the codec
    max_nonfinite_share: float = 0.001  # of samples; one at least, none when 0
    min_free_disk_share: float = 0.05


@dataclass(frozen=True)
class ValidateConfig:
    """Acceptance measurement in the runtime, during training and in the ladder."""

    k: int = 3
    num_prompts: int = 32
    max_tokens: int = 128
    temperature: float = 0.0
    placement: Literal["inline", "subprocess"] = "inline"
    # head directory, whoever wrote it; empty = runs/<name>/head; "native" = the MTP weights of the
    # target's own checkpoint
    head: str = ""
    old_target: str = ""  # that the head was trained for, where target.path changed since
    max_loss: float = 0.05  # share of the accepted tokens per step that it may lose by that
    sets: tuple[str, ...] = ("mtbench",)  # final evaluation only
    max_prompts: int = 200  # per set, evenly spaced; 0 = all
    max_further_prompts: int = 0  # of each set after the first; 0 = as max_prompts
    turns: int = 1  # 2: second turns as well, after the model's own first answers
    min_drafts: int = 3000  # P3 in bf16
    rungs: tuple[str, ...] = ("P0", "P1", "P2", "P3", "P4", "P5")


@dataclass(frozen=True)
class ReportConfig:
    """``report.html``. ``samples=False`` keeps every prompt, answer and training row out of it, and
    out of the run directory.
    """

    samples: bool = True
    max_samples: int = 8  # generated texts shown


ExportFormat = Literal[
    "mimo", "deepseek", "eagle3", "speculators", "eagle", "eagle_sglang", "medusa"
]
# Values that somebody may expect to be allowed -> why they are not, and what is nearest.
WHY_NOT: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("export.format", "qwen"): "engines read mtp.* beside targets with linear attention, which "
        "do not run here, and gate its queries, which no head here does (docs/formats.md); nearest "
        "are eagle3, and mimo for a head with head.decoder=llama"
    }
)


@dataclass(frozen=True)
class ExportConfig:
    """What `mtp export` writes for serving engines."""

    format: ExportFormat = "mimo"
    draft_vocab: Literal["refuse", "drop"] = "refuse"
    unvalidated: bool = False  # allow a head without a passing parity.json of exactly its weights
    max_length: int = 0  # tokens of a sequence that the directory allows; 0 = the target's
    max_file_gb: float = 5.0  # larger weights are split into shards with an index; 0: one file
    read_back: bool = True  # load what was written into the runtime and compare
    check: str = ""  # check this directory instead of writing one
    # mimo, deepseek: besides, a copy of the target there that holds the head as its own MTP weights
    copy_to: str = ""


HeadFormat = Literal[
    "native",
    "eagle",
    "speculators_eagle",
    "eagle3",
    "speculators_eagle3",
    "mimo",
    "deepseek_mtp",
    "qwen_mtp",
    "speculators_mtp",
    "medusa",
    "mlp_speculator",
    "peagle",
    "dflash",
    "dspark",
]


@dataclass(frozen=True)
class ForeignConfig:
    """How a head that others wrote is read, where its files leave that open."""

    format: Literal["auto", HeadFormat] = "auto"
    draft_ids: Literal["auto", "offset", "absolute"] = "auto"  # what d2t holds
    layer_ids: tuple[int, ...] = ()  # k of the S_k that fc reads; () = as config.json says
    norm_before_residual: Literal["auto", True, False] = "auto"
    concat: Literal["auto", "embedding_hidden", "hidden_embedding"] = "auto"
    first_embedding_mask: Literal["auto", True, False] = "auto"
    # target: an embedding or lm_head of its own that differs is replaced by the target's
    vocabulary: Literal["own", "target"] = "own"
    rope: Literal["head", "target"] = "head"  # whose RoPE it is read with, where they differ


@dataclass(frozen=True)
class InspectConfig:
    """`mtp inspect`: what a head directory is. The directory is an argument as well."""

    head: str = ""
    json: bool = False  # one JSON object instead of tables


@dataclass(frozen=True)
class ServingConfig:
    """The user's own serving engine, for rung P6; ``kind=none``: the rung is not climbed.

    It is started in the environment of ``python``, or runs already at ``url``.
    """

    kind: Literal["none", "vllm"] = "none"
    python: str = ""
    url: str = ""
    api_key_env: str = ""  # name of the environment variable that holds the server's key
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    k: tuple[int, ...] = (1, 3)
    sets: tuple[str, ...] = ("mtbench", "humaneval", "gsm8k")  # final evaluation only
    exact_prompts: int = 24  # fp32: compared step by step
    exact_tokens: int = 64
    max_running: int = 8  # prompts served together
    timeout_s: int = 3600
    args: tuple[tuple[str, str], ...] = ()  # further arguments of the engine; JSON or text


@dataclass(frozen=True)
class GenerateConfig:
    """`mtp generate`: one prompt, streamed. The prompt itself is an argument, not a setting."""

    k: int = 0  # drafted tokens per step; 0 = the fastest of P5, else validate.k
    max_tokens: int = 256
    temperature: float = 0.0
    raw: bool = False  # the prompt as it is, without the chat template
    head: str = ""  # head directory; empty = the run's, and plain text where there is none
    draft_model: str = ""  # a small model of the same vocabulary drafts instead of a head
    draft_layers: tuple[int, ...] = ()  # of it (or, without one, of the target); () = all
    compare: bool = True  # time plain decoding of the same tokens
    json: bool = False  # one JSON object instead of a stream


@dataclass(frozen=True)
class DoctorConfig:
    """`mtp doctor`: what this machine can do."""

    json: bool = False  # one JSON object instead of a table
    measure: bool = True  # disk, memory and matrix rates: a few seconds


@dataclass(frozen=True)
class PlanConfig:
    """`mtp plan`: what a run will need. ``data.max_tokens_total`` are its tokens."""

    hardware: str = "8xh100"  # here: this machine, as plan.calibrate measured it
    calibrate: bool = False  # measure this machine first, two minutes at most
    row_tokens: int = 600  # prompt and answer of a training row
    answer_tokens: int = 400  # of them
    json: bool = False  # one JSON object instead of tables


@dataclass(frozen=True)
class CheckRenderConfig:
    """`mtp data check-render`: the server's prompts beside those of the rows."""

    url: str = ""  # of a server that runs the target
    rows: int = 32  # prompts compared
    model: str = ""  # its name there; empty = the only one
    api_key_env: str = ""  # name of the environment variable that holds the key


@dataclass(frozen=True)
class PreflightConfig:
    """How small `mtp preflight` makes the line."""

    num_prompts: int = 32
    max_prompt_tokens: int = 512  # longer prompts are left out
    max_tokens: int = 64  # of each answer
    steps: int = 120
    learning_rate: float = 2e-3
    min_rate: float = 0.9  # first-position acceptance on the prompts that were trained on


@dataclass(frozen=True)
class HotVocabConfig:
    """`mtp hot-vocab`: the lists that are tried, and how long they are timed."""

    sizes: tuple[int, ...] = (4096, 8192, 16384)
    speed_prompts: int = 8  # decoded one by one, plain and with every list in turns; 0 = untimed
    speed_tokens: int = 64
    speed_repeats: int = 2


@dataclass(frozen=True)
class CompareConfig:
    """`mtp compare`: run directories beside each other. They are arguments as well."""

    runs: tuple[str, ...] = ()
    baseline: str = "first"  # first, best or the name of a run: what differences are against
    set: str = ""  # prompt set; empty = the one that most of the runs were measured on
    k: int = 0  # drafted tokens; 0 = likewise, the largest
    html: str = ""  # file for the page; empty = none
    json: bool = False  # one JSON object instead of tables


@dataclass(frozen=True)
class ReproduceConfig:
    """`mtp reproduce`: the commands that recreate a run. It is an argument as well."""

    run: str = ""  # its directory
    name: str = ""  # run.name of the commands; empty = the run's own
    root: str = ""  # run.root likewise
    json: bool = False  # one JSON object instead of a script


@dataclass(frozen=True)
class BenchConfig:
    """`mtp bench`: servers started in ``engine.python``'s environment, or those at ``url``."""

    url: tuple[str, ...] = ()  # of servers that run already
    heads: tuple[str, ...] = ()  # none and exported directories; with url: a name for each
    k: tuple[int, ...] = (1, 3)  # drafted tokens, of servers that are started here
    concurrency: tuple[int, ...] = (1, 4, 16)  # requests in flight
    prompts: tuple[str, ...] = ("mtbench",)  # evaluation sets, or files (.txt, .jsonl)
    num_prompts: int = 16  # of all of them together, evenly spaced
    max_tokens: int = 128  # of an answer
    rounds: int = 3  # every cell is measured once in each
    warm_up_tokens: int = 16  # of the answers before a cell that are not measured; 0 = none
    min_equal: float = 0.5  # share of texts as in plain decoding without which nothing can win
    servers: Literal["one", "all"] = "one"  # alive at a time; one: started anew in every round
    model: str = ""  # its name at the servers of url; empty = the only one
    out: str = ""  # where the JSON goes; empty = runs/<name>/bench.json
    svg: str = ""  # file for a picture of the tables; empty = none


@dataclass(frozen=True)
class Config:
    """One command's whole configuration."""

    run: RunConfig
    target: TargetConfig
    data: DataConfig
    seed: int = 1234
    head: HeadConfig = HeadConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    features: FeaturesConfig = FeaturesConfig()
    runtime: EngineConfig = EngineConfig()
    validate: ValidateConfig = ValidateConfig()
    export: ExportConfig = ExportConfig()
    foreign: ForeignConfig = ForeignConfig()
    inspect: InspectConfig = InspectConfig()
    engine: ServingConfig = ServingConfig()
    preflight: PreflightConfig = PreflightConfig()
    report: ReportConfig = ReportConfig()
    generate: GenerateConfig = GenerateConfig()
    doctor: DoctorConfig = DoctorConfig()
    plan: PlanConfig = PlanConfig()
    check_render: CheckRenderConfig = CheckRenderConfig()
    hot_vocab: HotVocabConfig = HotVocabConfig()
    compare: CompareConfig = CompareConfig()
    reproduce: ReproduceConfig = ReproduceConfig()
    bench: BenchConfig = BenchConfig()


def get_field(config: Config, path: str) -> Any:
    """The value at a dotted path such as ``data.regenerate.top_p``."""
    return functools.reduce(getattr, path.split("."), config)

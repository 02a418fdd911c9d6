"""The plan itself: memory by part, disk by codec, hours by stage, and what to set.

Pure arithmetic over :mod:`facts`, :mod:`step_cost`, :mod:`zero_states` and :mod:`hardware`. Every
figure carries its formula. Letters: W weights of the target, A those a token passes through, H of
the head, T training tokens, E epochs, K unrolled steps, V vocabulary, D width, n devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_train.config import Codec, Config
from mtp_train.features.codecs import STORED_DTYPES
from mtp_train.features.estimate import estimate_size
from mtp_train.plan.facts import TargetFacts, count_weights, plan_head_spec
from mtp_train.plan.hardware import Hardware
from mtp_train.plan.memory_parts import Part, copied_rows, cost_parts, host_parts
from mtp_train.plan.step_cost import Rows, StepCost, StepCosts
from mtp_train.plan.zero_states import STAGES, HeadStates, head_states

USABLE_SHARE = 0.9  # of a device's memory; the rest is for what is not counted
LARGEST_HOT = 8192  # ids of the loss that a calibration tries where the settings have none
_SET_PROMPTS = {"mtbench": 80, "humaneval": 164, "gsm8k": 1319}
_LADDER_TOKENS = 128  # per prompt of the final measurement
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class MemoryUse:
    """What a stage holds at its peak on each device."""

    stage: str
    parts: tuple[Part, ...]
    capacity: float

    @property
    def total(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.total <= USABLE_SHARE * self.capacity


@dataclass(frozen=True)
class StageTime:
    name: str
    seconds: float
    formula: str


@dataclass(frozen=True)
class ZeroOption:
    """``max_micro_batch``: most tokens of one micro-batch on a rank; 0 where not one row fits."""

    zero_stage: int
    state_bytes: float
    max_micro_batch: int


@dataclass(frozen=True)
class Advice:
    """What to set. ``zero_stage`` None: no stage fits."""

    zero_stage: int | None
    gradient_accumulation: int
    micro_batch_tokens: int  # of one rank
    tensor_parallel: int  # devices that one copy of the target needs
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    target: TargetFacts
    hardware: str
    num_devices: int
    is_measured: bool
    num_tokens: int
    rows: Rows
    num_head_weights: int
    steps: int  # of the optimiser
    step_seconds: float
    codec: Codec
    features: tuple[tuple[Codec, int], ...]
    memory: tuple[MemoryUse, ...]
    times: tuple[StageTime, ...]
    zero_options: tuple[ZeroOption, ...]
    advice: Advice
    notes: tuple[str, ...]

    @property
    def feature_bytes(self) -> int:
        return dict(self.features)[self.codec]

    def hours(self, stage: str) -> float:
        return next(time.seconds for time in self.times if time.name == stage) / 3600


def make_plan(config: Config, facts: TargetFacts, hardware: Hardware, *, num_tokens: int) -> Plan:
    """What training a head of ``config`` for such a target on ``num_tokens`` tokens takes.

    Raises ``ValueError`` for a part of the vocabulary that is not smaller than the vocabulary, and
    for residual streams that the target does not have.
    """
    return _Planner(config, facts, hardware, num_tokens).plan()


class _Planner:
    def __init__(
        self, config: Config, facts: TargetFacts, hardware: Hardware, num_tokens: int
    ) -> None:
        for name, size in (
            ("loss.sub_vocab_size", config.loss.sub_vocab_size),
            ("head.draft_vocab_size", config.head.draft_vocab_size),
        ):
            if size >= facts.vocab_size:
                raise ValueError(
                    f"{name}={size}: must be below the vocabulary of {facts.name}, "
                    f"{facts.vocab_size}"
                )
        self.config, self.facts, self.hardware = config, facts, hardware
        self.num_tokens = num_tokens
        self.width = _DTYPES[hardware.dtype].itemsize
        asked = config.trainer.dtype
        self.train_dtype = _DTYPES[hardware.train_dtype if asked == "auto" else asked]
        self.train_width = self.train_dtype.itemsize
        settings = config.plan
        self.rows = Rows(settings.row_tokens, settings.answer_tokens)
        self.spec = spec = plan_head_spec(facts, config.head)
        self.head_weights = count_weights(spec)
        self.costs = StepCosts(spec, config.loss, self.rows, dtype=self.train_dtype)
        self.n = hardware.num_devices
        # A step is closed by the row that fills it, half a row too late on average.
        self.step_tokens = config.trainer.tokens_per_step + self.rows.num_tokens / 2
        self.trained_tokens = min(num_tokens, config.trainer.max_tokens or num_tokens)
        self.steps = config.trainer.max_steps or config.trainer.epochs * math.ceil(
            self.trained_tokens / self.step_tokens
        )
        self.tensor_parallel = self._tensor_parallel()

    def plan(self) -> Plan:
        options = tuple(self._zero_option(stage) for stage in STAGES if self._is_allowed(stage))
        advice = self._advice(options)
        step = self._step_seconds()
        return Plan(
            target=self.facts,
            hardware=self.hardware.name,
            num_devices=self.n,
            is_measured=self._is_measured,
            num_tokens=self.num_tokens,
            rows=self.rows,
            num_head_weights=self.head_weights,
            steps=self.steps,
            step_seconds=step,
            codec=self.config.features.codec,
            features=tuple((codec, self._feature_bytes(codec)) for codec in STORED_DTYPES),
            memory=(self._decoding_memory(), self._training_memory()),
            times=(self._answers(), self._dump(), self._training(step), self._validation()),
            zero_options=options,
            advice=advice,
            notes=tuple(self._notes()),
        )

    @property
    def _is_measured(self) -> bool:
        return self.hardware.is_measured and self.hardware.measured_on == self.facts.name

    # --- memory

    @property
    def _target_bytes(self) -> float:
        return self.facts.weight_bytes(self.width, stored=self._keeps_width)

    @property
    def _keeps_width(self) -> bool:
        """Whether quantised weights stay as they are stored, as the loader decides it."""
        asked = self.config.runtime.stored_weights
        is_possible = bool(self.facts.num_stored_weights) and self.tensor_parallel == 1
        is_chosen = not self.hardware.is_cpu or self.facts.multiplies_int8
        return is_possible and (asked == "stored" or (asked == "auto" and is_chosen))

    def _pool(self, *, share: int) -> Part:
        runtime = self.config.runtime
        slots = runtime.num_pages * runtime.page_size
        values = self.facts.kv_width * self.facts.num_layers
        values += self.facts.head_kv_width(self.config.head) * self.config.head.num_layers
        return Part(
            "K/V pool",
            slots * values * self.width / share,
            f"{slots:,} slots x {values * self.width / 1000:,.1f} kB",
        )

    def _tensor_parallel(self) -> int:
        """Fewest devices, a divisor of all, over which weights and K/V of the target fit."""
        asked = self.config.features.tensor_parallel
        for count in range(1, self.n + 1):
            self.tensor_parallel = count  # one device alone keeps the stored width
            needed = self._target_bytes + self._pool(share=1).num_bytes
            is_enough = needed / count <= USABLE_SHARE * self.hardware.memory_bytes
            if self.n % count == 0 and count >= min(asked, self.n) and is_enough:
                return count
        return self.n

    @property
    def _weights_formula(self) -> str:
        facts = self.facts
        if not self._keeps_width:
            return f"W {facts.num_weights / 1e9:,.3f}G x {self.width} B"
        plain = facts.num_weights - facts.num_stored_weights
        return (
            f"{facts.num_stored_weights / 1e9:,.3f}G of W x 1 B + {facts.num_scales / 1e6:,.1f}M "
            f"scales x 4 B + {plain / 1e9:,.3f}G x {self.width} B"
        )

    def _decoding_memory(self) -> MemoryUse:
        share = self.tensor_parallel
        over = f" / {share}" if share > 1 else ""
        weights = Part(
            "target weights",
            self._target_bytes / share,
            self._weights_formula + over,
        )
        rows = self.config.features.max_batch_tokens
        activations = Part(
            "one batch of rows",
            rows * self.width * (4 * self.facts.hidden_size + 3 * self.facts.head_inner / share),
            f"{rows:,} rows x (4D + 3 MLP widths) x {self.width} B",
        )
        parts = (*self._base(), weights, self._pool(share=share), activations)
        return MemoryUse("answers, dump, validation", parts, self.hardware.memory_bytes)

    def _training_memory(self) -> MemoryUse:
        tokens = self._micro_batch(self.config.trainer.gradient_accumulation)
        states = self._states(self.config.deepspeed.zero_stage)
        cost = self.costs.of(tokens + self.rows.num_tokens)
        parts = (
            *self._beside_training(),
            *self._head_parts(states),
            *cost_parts(cost, tokens),
            *self._heap(cost),
        )
        return MemoryUse("training", parts, self.hardware.memory_bytes)

    def _base(self) -> tuple[Part, ...]:
        size = self.hardware.speeds.base_bytes
        return (Part("process", size, "measured: interpreter, libraries"),) if size else ()

    def _heap(self, cost: StepCost) -> tuple[Part, ...]:
        factor = self.hardware.speeds.heap_factor
        if factor == 1:
            return ()
        more = (factor - 1) * cost.peak_bytes
        return (Part("allocator", more, f"measured: {factor:.2f} x the three above"),)

    def _beside_training(self) -> tuple[Part, ...]:
        """What lies on a training rank whatever it trains with."""
        loss, facts = self.config.loss, self.facts
        parts = list(self._base())
        if self._validates_inline:
            parts.append(
                Part(
                    "target weights",
                    self._target_bytes,
                    f"{self._weights_formula}, validation inline",
                )
            )
            parts.append(self._pool(share=1))
        else:
            size = float(facts.num_embedding_weights * self.train_width)
            parts.append(Part("embedding, lm_head", size, f"of the target, {self.train_width} B"))
        parts += copied_rows(loss, self.config.head, facts, self.train_width)
        if self.hardware.is_cpu:
            seen = self.steps * self.step_tokens
            parts += host_parts(self.config, facts, seen=seen, num_tokens=self.num_tokens)
        return tuple(parts)

    @property
    def _validates_inline(self) -> bool:
        return self.config.trainer.validate_every > 0 and self.config.validate.placement == "inline"

    def _head_parts(self, states: HeadStates) -> tuple[Part, ...]:
        stage = f"H {self.head_weights / 1e6:,.1f}M, ZeRO {self.config.deepspeed.zero_stage}"
        values = (
            ("head weights", states.weights),
            ("master weights", states.master),
            ("moments", states.moments),
            ("gradients", states.gradients),
            ("gradient bucket", states.bucket),
            ("offloaded", states.offloaded if self.hardware.is_cpu else 0.0),
        )
        return tuple(
            Part(name, size, f"{size / self.head_weights:.2f} B x {stage}")
            for name, size in values
            if size
        )

    def _states(self, zero_stage: int) -> HeadStates:
        return head_states(
            self.head_weights,
            zero_stage=zero_stage,
            ranks=self.n,
            width=self.train_width,
            is_cpu=self.hardware.is_cpu,
            offload=self.config.deepspeed.offload if zero_stage else "none",
            optimizer=self.config.trainer.optimizer,
        )

    # --- recommendation

    def _is_allowed(self, zero_stage: int) -> bool:
        return zero_stage > 0 or self.train_width == 4

    def _zero_option(self, zero_stage: int) -> ZeroOption:
        states = self._states(zero_stage)
        state = states.total + (states.offloaded if self.hardware.is_cpu else 0.0)
        fixed = sum(part.num_bytes for part in self._beside_training()) + state
        room = USABLE_SHARE * self.hardware.memory_bytes - fixed
        one_row = self.rows.num_tokens
        fitting = 0
        room /= self.hardware.speeds.heap_factor
        if self.costs.of(2 * one_row).peak_bytes <= room:
            low, high = 2, 2**20  # rows; the micro-batch may end with one that is too much
            while low + 1 < high:
                middle = (low + high) // 2
                if self.costs.of(middle * one_row).peak_bytes <= room:
                    low = middle
                else:
                    high = middle
            fitting = (low - 1) * one_row
        return ZeroOption(zero_stage, state, fitting)

    def _advice(self, options: tuple[ZeroOption, ...]) -> Advice:
        """The lowest stage that leaves room for a whole step at once, else for the most."""
        wanted = self._micro_batch(1)
        fitting = [option for option in options if option.max_micro_batch]
        settings = []
        if self.tensor_parallel > 1:
            settings.append(f"features.tensor_parallel={self.tensor_parallel}")
        if not fitting:
            return Advice(None, 1, 0, self.tensor_parallel, tuple(settings))
        most = max(option.max_micro_batch for option in fitting)
        chosen = next(o for o in fitting if o.max_micro_batch >= min(wanted, most))
        accumulation = max(1, math.ceil(wanted / chosen.max_micro_batch))
        settings += [
            f"deepspeed.zero_stage={chosen.zero_stage}",
            f"trainer.tokens_per_step={self.config.trainer.tokens_per_step}",
            f"trainer.gradient_accumulation={accumulation}",
        ]
        return Advice(
            chosen.zero_stage,
            accumulation,
            self._micro_batch(accumulation),
            self.tensor_parallel,
            tuple(settings),
        )

    def _micro_batch(self, accumulation: int) -> int:
        return math.ceil(self.config.trainer.tokens_per_step / (self.n * accumulation))

    # --- disk and hours

    def _feature_bytes(self, codec: Codec) -> int:
        whole, rest = divmod(self.num_tokens, self.rows.num_tokens)
        lengths = [self.rows.num_tokens] * whole + ([rest] if rest else [])
        size = estimate_size(
            lengths,
            hidden_size=self.facts.hidden_size,
            codec=codec,
            num_states=1 + len(self.spec.layer_ids),
        )
        return size.num_bytes

    def _decode_step_s(self) -> float:
        speeds = self.hardware.speeds
        # A step of many requests reads every expert.
        return speeds.decode.seconds(self._target_bytes / self.tensor_parallel)

    def _decode_batch(self) -> int:
        if self.hardware.decode_batch:
            return self.hardware.decode_batch
        regenerate = self.config.data.regenerate
        by_servers = bool(regenerate.url) or self.tensor_parallel > 1
        return regenerate.concurrency if by_servers else self.config.runtime.max_running

    def _answers(self) -> StageTime:
        share = self.rows.num_answer_tokens / self.rows.num_tokens
        copies = self.n // self.tensor_parallel
        batch, step = self._decode_batch(), self._decode_step_s()
        seconds = self.num_tokens * share / (batch * copies) * step
        formula = (
            f"T x {self.rows.num_answer_tokens}/{self.rows.num_tokens} / ({batch} requests x "
            f"{copies} copies) x {1000 * step:.2f} ms per step"
        )
        return StageTime("answers", seconds, formula)

    def _dump(self) -> StageTime:
        speeds, stored = self.hardware.speeds, self._feature_bytes(self.config.features.codec)
        arithmetic = speeds.dump.seconds(2 * self.facts.num_active_weights * self.num_tokens)
        seconds = max(arithmetic / self.n, stored / speeds.disk_bytes_per_s)
        formula = (
            f"the longer of 2 x A x T / (n x {_rate(speeds.dump.per_s)}) and features / "
            f"{speeds.disk_bytes_per_s / 1e9:.2f} GB/s"
        )
        return StageTime("dump", seconds, formula)

    def _step_seconds(self) -> float:
        """One optimiser step of the mean number of tokens."""
        speeds, trainer = self.hardware.speeds, self.config.trainer
        parts = self.n * trainer.gradient_accumulation
        tokens = self.step_tokens / parts
        cost = self.costs.of(round(tokens))
        loss = speeds.loss_hot if self.config.loss.sub_vocab_size else speeds.loss_full
        micro = (
            speeds.forward.seconds(cost.forward_flops)
            + loss.seconds(cost.loss_flops)
            + speeds.backward.seconds(cost.backward_flops)
            + speeds.pack.seconds(tokens)
        )
        return trainer.gradient_accumulation * micro + speeds.optimiser.seconds(self.head_weights)

    def _training(self, step: float) -> StageTime:
        speeds, disk = self.hardware.speeds, self.hardware.speeds.disk_bytes_per_s
        seen = self.steps * self.step_tokens
        per_token = self.costs.of(round(self.step_tokens / self.n)).flops / (
            self.step_tokens / self.n
        )
        seconds = self.steps * step
        formula = (
            f"{self.steps:,} steps x {1000 * step:.1f} ms: {per_token / 1e9:.3f} GFLOP per token, "
            f"counted from the trainer's own head and loss, at {_rate(speeds.forward.per_s)} x n"
        )
        if self.config.loss.sub_vocab_size or self.spec.draft_vocab is not None:
            seconds += self._normaliser_seconds(min(seen, self.trained_tokens))
            formula += "; the first epoch adds the target's logits once, 2 x V x D per answer token"
        stored = self._feature_bytes(self.config.features.codec)
        reading = seen / self.num_tokens * stored / disk
        if reading > seconds:
            seconds, formula = reading, f"reading features at {disk / 1e9:.2f} GB/s, E x features"
        return StageTime("training", seconds, formula)

    def _normaliser_seconds(self, tokens: float) -> float:
        share = self.rows.num_answer_tokens / self.rows.num_tokens
        flops = 2.0 * self.facts.vocab_size * self.facts.hidden_size * tokens * share
        return self.hardware.speeds.normaliser.seconds(flops) / self.n

    def _validation(self) -> StageTime:
        """Drafts that are never accepted: the most it can take."""
        validate, every = self.config.validate, self.config.trainer.validate_every
        in_training = self.steps // every if every else 0
        decoded = in_training * validate.num_prompts * validate.max_tokens
        for number, name in enumerate(validate.sets):
            limit = validate.max_prompts or _SET_PROMPTS[name]
            if number and validate.max_further_prompts:
                limit = validate.max_further_prompts
            runs = 2 if number == 0 else 1  # the first set at K = 1 as well
            decoded += runs * min(limit, _SET_PROMPTS[name]) * _LADDER_TOKENS
        batch = self.hardware.decode_batch or self.config.runtime.max_running
        draft = self._draft_weights() / self.facts.num_active_weights
        step = self._decode_step_s() * (1 + validate.k * draft)
        formula = (
            f"{decoded:,} tokens / {batch} requests x {1000 * step:.2f} ms per step with K = "
            f"{validate.k} drafts, none accepted; {in_training} validations in training and the "
            "final prompt sets, without the parity rungs' own checks"
        )
        return StageTime("validation", decoded / batch * step, formula)

    def _draft_weights(self) -> float:
        """Weights that one drafted token passes through."""
        weights = self.head_weights / max(1, self.spec.num_blocks)
        if self.spec.lm_head == "own":
            return weights
        return weights + self.facts.vocab_size * self.facts.hidden_size

    def _notes(self) -> list[str]:
        facts, notes = self.facts, []
        if not self.hardware.is_measured:
            notes.append(
                f"{self.hardware.name} was not measured: hours are estimated from published peaks, "
                "30 % of the arithmetic in training, 40 % in the dump, half of the memory's rate"
            )
        elif not self._is_measured:
            notes.append(
                f"rates were measured with {self.hardware.measured_on}, not with {facts.name}: "
                "hours are estimated"
            )
        train_dtype = str(self.train_dtype).removeprefix("torch.")
        if train_dtype != self.hardware.train_dtype:
            notes.append(
                f"trainer.dtype={train_dtype}: rates are those of training in "
                f"{self.hardware.train_dtype}, memory is counted in {train_dtype}"
            )
        offloaded = self._states(self.config.deepspeed.zero_stage).offloaded
        if offloaded and not self.hardware.is_cpu:
            notes.append(
                f"deepspeed.offload={self.config.deepspeed.offload}: {offloaded / 1e9:,.1f} GB of "
                "the host's memory for each rank; the time of copies and of the step on the host "
                "is not counted"
            )
        if not facts.is_runnable:
            notes.append(f"{facts.architecture}: this build's runtime does not load such a target")
        if facts.quantisation:
            how = "as stored" if self._keeps_width else f"in {self.width} bytes each, de-quantised"
            notes.append(f"quantised target ({facts.quantisation}): weights are held {how}")
        if self.tensor_parallel > 1:
            notes.append(
                f"one copy of the target takes {self.tensor_parallel} devices: answers need "
                "servers that hold it (regenerate.url), and mtp validate wants it on one device"
            )
        return notes


def _rate(per_s: float) -> str:
    return f"{per_s / 1e12:,.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:,.0f} GFLOP/s"

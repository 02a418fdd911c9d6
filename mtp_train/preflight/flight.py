"""The hops: data, features, training, runtime, export and engine, each on the same few prompts.

A head that has learnt the target's answers to a few prompts by heart must draft them again: in the
runtime, from the exported directory, and in the user's engine. Where it does not, the hop between
the last that did and the first that did not is broken. The stages are those of the real commands,
in a run of their own (``runs/<name>/preflight``).
"""

from __future__ import annotations

from functools import cached_property

import torch

from data_prep.conversation import BEYOND_LIMITS
from data_prep.token_set import TokenRow, load_token_set
from mtp_train import stages
from mtp_train.config import Config
from mtp_train.distributed import init_process_group
from mtp_train.events import read_events
from mtp_train.export.layouts import find_layout
from mtp_train.export.reader import check_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.features.manifest import load_manifest
from mtp_train.features.p0 import DECODE_ERROR
from mtp_train.features.reader import FeatureReader
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.heads.init import make_head_spec
from mtp_train.preflight.acceptance import DecodedText, LearntAcceptance, count_learnt
from mtp_train.preflight.hops import Hop, Judgement
from mtp_train.preflight.plan import preflight_config, training_config
from mtp_train.rules import check_config
from mtp_train.run_dir import RunDirectory, read_json
from mtp_train.serving.engine import served_lengths
from mtp_train.validate.measure import measure_acceptance
from mtp_train.validate.served import Serve, serve_and_compare
from mtp_train.validate.subject import Subject, open_subject
from mtp_train.validate.unroll import HiddenSequence, training_drafts
from runtime.models.config import load_config
from runtime.models.loader import fingerprint_target

ENGINE_HOP = "engine"
MIN_USABLE_SHARE = 0.5  # of the prompts that were asked for
MIN_AGREEMENT = 0.25  # of the answer tokens, before an engine's text leaves the answer
MAX_LOSS_SHARE = 0.9  # of the first loss; the target's own entropy stays


class Preflight:
    """One preflight. Every hop reads what the hops before it left in the run directory."""

    def __init__(self, config: Config, *, serve: Serve | None) -> None:
        """``serve``: the user's engine, if there is one."""
        self.settings = config.preflight
        self.config = preflight_config(config)
        self.run = RunDirectory.from_config(self.config)
        self._serve = serve

    def hops(self) -> tuple[Hop, ...]:
        hops = (
            Hop("head", "can this head be served at all?", self.check_head),
            Hop("data", "does the data render, and does the target answer?", self.check_data),
            Hop("features", "are the states those of decoding (P0)?", self.check_features),
            Hop("training", "does the head learn the answers?", self.check_training),
            Hop("runtime", "does it draft them in our runtime?", self.check_runtime),
            Hop("export", "is the exported directory the head (P2)?", self.check_export),
            Hop("exported head", "does that directory draft them?", self.check_exported_head),
        )
        if self._serve is None:
            return hops
        return (*hops, Hop(ENGINE_HOP, "does your engine draft them?", self.check_engine))

    @cached_property
    def device(self) -> torch.device:
        group = init_process_group(device=self.config.target.device)
        try:
            return group.device
        finally:
            group.close()

    def check_head(self) -> Judgement:
        """The format carries the head, the target is one that we run, the settings go together."""
        check_config(self.config)
        directory = target_directory(self.config.target)
        fingerprint = fingerprint_target(directory, cache_dir=cache_directory(self.config.target))
        spec = make_head_spec(self.config.head, load_config(directory), fingerprint=fingerprint)
        drop = self.config.export.draft_vocab == "drop"
        layout = find_layout(self.config.export.format)
        layout.refuse_uncarried(spec, drop_draft_vocab=drop)
        layout.refuse_path(self.run.export(self.config.export.format))
        count = sum(torch.Size(shape).numel() for shape in spec.tensor_shapes().values())
        return Judgement(
            True, f"{count:,} values for {directory.name}", f"format {self.config.export.format}"
        )

    def check_data(self) -> Judgement:
        stages.run_data(self.config)
        rows, wanted = self.rows, self.settings.num_prompts
        answered = sum(len(answer_of(row)) for row in rows)
        least = max(1, round(wanted * MIN_USABLE_SHARE))
        rejects = read_json(self.run.data / "statistics.json")["rejects"]
        lost = {name: count for name, count in rejects.items() if name not in BEYOND_LIMITS}
        reasons = ", ".join(f"{name} {count}" for name, count in lost.items())
        return Judgement(
            len(rows) >= least,
            f"{len(rows)} prompts, {answered:,} answer tokens",
            f"≥ {least} prompts",
            note=f"rejected: {reasons} (data.sources, preflight.max_prompt_tokens)",
            figures={"prompts": len(rows), "answer_tokens": answered, "rejects": rejects},
        )

    def check_features(self) -> Judgement:
        """The dump checks P0 while it writes and refuses; here are the figures."""
        stages.run_precompute(self.config)
        manifest = load_manifest(self.run.features / "train")
        worst = {"max_gap": 0.0, "mean_kl": 0.0, "codec_mean_kl": 0.0}
        dtype = ""
        for shard in manifest.shards:
            assert shard.p0 is not None, "a dump measures P0"
            dtype = shard.p0.dtype
            worst["codec_mean_kl"] = max(worst["codec_mean_kl"], shard.p0.codec_mean_kl)
            for item in shard.p0.comparisons:
                if item.name == DECODE_ERROR:  # the dtype's own error: a yardstick, no finding
                    continue
                worst["max_gap"] = max(worst["max_gap"], item.max_gap)
                worst["mean_kl"] = max(worst["mean_kl"], item.mean_kl)
        missing = len(self.rows) - manifest.num_samples
        exact = dtype == "float32"
        name, bound = (
            ("max_gap", self.config.features.p0_max_logprob_gap)
            if exact
            else ("mean_kl", self.config.features.p0_max_kl)
        )
        return Judgement(
            missing == 0 and worst[name] <= bound,
            f"{name.replace('_', ' ')} {worst[name]:.1e} nats in {dtype}, "
            f"codec {worst['codec_mean_kl']:.1e}",
            f"≤ {bound:.0e}",
            note=f"{missing} samples have states that are not finite" if missing else "",
            figures=worst | {"missing": missing},
        )

    def check_training(self) -> Judgement:
        """Loss falls, and the training forward's own arg-max is right on the rows it has seen."""
        num_tokens = sum(len(row.input_ids) for row in self.rows)
        stages.run_train(training_config(self.config, num_tokens=num_tokens))
        events = read_events(self.run.events_file, stage="train", event="step")
        losses = [float(event["loss"]) for event in events]
        accuracy = self.training_accuracy()
        falls = losses[-1] <= MAX_LOSS_SHARE * losses[0]
        bound = self.settings.min_rate
        note = ""
        if not falls:
            note = "the loss does not fall: look at preflight.learning_rate and the loss's settings"
        elif accuracy < bound:
            note = "not learnt by heart: raise preflight.steps"
        return Judgement(
            falls and accuracy >= bound,
            f"loss {losses[0]:.2f} → {losses[-1]:.2f}, top-1 {accuracy:.3f}",
            f"top-1 ≥ {bound:g}",
            note=note,
            figures={"first_loss": losses[0], "last_loss": losses[-1], "accuracy": accuracy},
        )

    def check_runtime(self) -> Judgement:
        return self._judge(self.decode(self.subject(exported=False)), "in the runtime")

    def check_export(self) -> Judgement:
        stages.run_export(self.config)
        place = self.run.export(self.config.export.format)
        check_export(
            place,
            target_dir=target_directory(self.config.target),
            cache_dir=cache_directory(self.config.target),
        )
        record = ExportRecord.read(place / EXPORT_NAME)
        return Judgement(
            True,
            f"{len(record.tensors)} tensors, equal to the head",
            "every tensor, every key; P2",
            figures={"files": record.files_sha256},
        )

    def check_exported_head(self) -> Judgement:
        counts = self.decode(self.subject(exported=True))
        return self._judge(counts, "from the exported directory")

    def check_engine(self) -> Judgement:
        """The exported directory in the user's engine, in the target's dtype."""
        assert self._serve is not None, "there is no such hop without an engine"
        subject = self.subject(exported=True)
        rows, k = self.rows, self.served_k
        pair = serve_and_compare(
            subject,
            [prompt_of(row) for row in rows],
            k=k,
            dtype=subject.runtime_dtype,
            max_tokens=self.settings.max_tokens,
            serve=self._serve,
            max_running=self.config.engine.max_running,
        )
        served = pair.served
        texts = [
            DecodedText(answer_of(row), answer.output_ids, answer.accepted_per_step, answer.counts)
            for row, answer in zip(rows, served.prompts, strict=True)
        ]
        return self._judge(count_learnt(texts, k=k), f"in {served.engine} {served.version}")

    @property
    def served_k(self) -> int:
        """``validate.k``, or the K of a server that runs already."""
        return served_lengths(self.config)[0] if self.config.engine.url else self.config.validate.k

    @property
    def rows(self) -> list[TokenRow]:
        return list(load_token_set(self.run.data).rows("train"))

    def subject(self, *, exported: bool) -> Subject:
        format = self.config.export.format
        head = self.run.export(format) if exported else self.run.head
        return open_subject(self.config, head, device=self.device)

    def training_accuracy(self) -> float:
        """Share of answer tokens that the training forward puts first, from the stored states."""
        subject = self.subject(exported=False)
        dtype = subject.runtime_dtype
        reader = FeatureReader(self.run.features / "train")
        samples = [reader.get(index) for index in range(len(reader))]
        starts = [
            [i for i in range(len(s.input_ids) - 2) if bool(s.loss_mask[i + 2])] for s in samples
        ]
        pairs = [(sample, own) for sample, own in zip(samples, starts, strict=True) if own]
        if not pairs:
            raise ValueError("no answer has the two tokens that a drafted one needs before it")
        right = total = 0
        head = subject.training_head(dtype)
        embedding_VD, lm_heads = subject.embedding(dtype), subject.draft_lm_heads(dtype)
        for sample, own in pairs:
            hidden = sample.hidden.to(subject.device, dtype)
            layers = None
            if subject.spec.reads_layers and sample.layers is not None:
                layers = sample.layers.to(subject.device, dtype)
            (drafts_S1,) = training_drafts(
                head,
                [HiddenSequence(sample.input_ids, hidden, layers)],
                [own],
                num_steps=1,
                embedding_VD=embedding_VD,
                lm_heads=lm_heads,
                draft_columns=subject.draft_columns(),
            )
            labels_S = sample.input_ids[torch.tensor(own) + 2]
            right += int((drafts_S1[:, 0] == labels_S).sum())
            total += len(own)
        return right / total

    def decode(self, subject: Subject) -> LearntAcceptance:
        """Target and head together in the runtime, over the prompts that were trained on."""
        rows, k = self.rows, self.config.validate.k
        measured = measure_acceptance(
            subject.target(subject.runtime_dtype),
            subject.head(subject.runtime_dtype),
            [prompt_of(row) for row in rows],
            k=k,
            max_tokens=self.settings.max_tokens,
            temperature=0.0,
            engine_config=subject.engine_config,
            prompt_set="preflight",
        )
        texts = [
            DecodedText(
                answer_of(row),
                generation.output_ids,
                [step.num_accepted for step in generation.steps],
            )
            for row, generation in zip(rows, measured.generations, strict=True)
        ]
        return count_learnt(texts, k=k)

    def _judge(self, counts: LearntAcceptance, where: str) -> Judgement:
        return judge_acceptance(counts, min_rate=self.settings.min_rate, where=where)


def judge_acceptance(counts: LearntAcceptance, *, min_rate: float, where: str) -> Judgement:
    """First-position acceptance of a text learnt by heart."""
    first = counts.rates[0]
    note = ""
    if counts.agreement < MIN_AGREEMENT:
        note = (
            f"the text decoded {where} leaves the target's answers after "
            f"{counts.agreement:.0%} of them: another model, template or dtype is at work"
        )
    elif first < min_rate:
        note = f"what was learnt by heart is not drafted {where}"
    return Judgement(
        not note,
        f"first position {first:.3f} of {counts.steps} drafts, {counts.agreement:.0%} of the text",
        f"≥ {min_rate:g}, ≥ {MIN_AGREEMENT:.0%}",
        note=note,
        figures={
            "rates": counts.rates,
            "drafts": counts.steps,
            "accepted": counts.accepted,
            "agreement": counts.agreement,
        },
    )


def prompt_of(row: TokenRow) -> tuple[int, ...]:
    """Everything before the first token that the target wrote."""
    return row.input_ids[: row.loss_mask.index(True)]


def answer_of(row: TokenRow) -> tuple[int, ...]:
    """What the target wrote."""
    return tuple(
        token for token, is_own in zip(row.input_ids, row.loss_mask, strict=True) if is_own
    )

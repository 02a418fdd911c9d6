"""A head beside a target that changed since it was trained: what it lost, and whether to train it
again.

The figure that decides is tau - 1, the accepted tokens per step. It is trained again where the
target's change cost more than ``validate.max_loss`` of them and the interval of the difference lies
below zero: on what was measured, not on what might be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtp_train.compare.statistics import unpaired
from mtp_train.config import Config
from mtp_train.report.facts import Figure
from mtp_train.run_dir import PARITY_NAME, read_json
from mtp_train.validate.bootstrap import paired_interval, tau_of_sums
from mtp_train.validate.measure import Measured, acceptance_sums, measure_acceptance
from mtp_train.validate.report import MeasuredTau, TargetChange
from mtp_train.validate.subject import Subject
from runtime.seeds import derive_seed


def examine_change(config: Config, subject: Subject, measured: Measured) -> TargetChange:
    """``measured``: on the target that there is now, at ``validate.k``.

    The old figure is measured on ``validate.old_target`` where that is given, on the same prompts,
    else taken from the ``parity.json`` beside the head. Raises ``ValueError`` when that target is
    not the one that the head was trained for.
    """
    new = _of(measured, subject.target(subject.runtime_dtype).fingerprint, "measured now")
    max_loss = config.validate.max_loss
    if config.validate.old_target:
        before = _measure_old(config, subject, measured)
        old = _of(before, subject.spec.target_fingerprint, "measured now, validate.old_target")
        sums = [acceptance_sums(item.generations, item.k) for item in (measured, before)]
        interval = paired_interval(sums[0], sums[1], tau_of_sums)
        difference = (new.tau - old.tau, interval.low, interval.high)
        return judge_change(measured, new, old, difference, is_paired=True, max_loss=max_loss)
    recorded = _recorded(subject, measured)
    if recorded is None:
        return judge_change(measured, new, None, None, is_paired=False, max_loss=max_loss)
    level = measured.tau_interval.level
    gap = unpaired(
        Figure(new.tau, new.low, new.high, level),
        Figure(recorded.tau, recorded.low, recorded.high, level),
    )
    assert gap.low is not None, "both have intervals"
    assert gap.high is not None, "both have intervals"
    difference = (gap.value, gap.low, gap.high)
    return judge_change(measured, new, recorded, difference, is_paired=False, max_loss=max_loss)


def judge_change(
    measured: Measured,
    new: MeasuredTau,
    old: MeasuredTau | None,
    difference: tuple[float, float, float] | None,
    *,
    is_paired: bool,
    max_loss: float,
) -> TargetChange:
    """The verdict on figures that are there; see the module's docstring for the rule."""
    lost = None
    retrain: bool | None = None
    if old is None or difference is None:
        reason = (
            f"no {PARITY_NAME} beside the head holds this measurement on its own target; "
            "validate.old_target=DIR measures it there"
        )
    elif old.tau <= 1:
        retrain, reason = True, "nothing was accepted on the old target either"
    else:
        lost = -difference[0] / (old.tau - 1)
        is_certain, is_large = difference[2] < 0, lost > max_loss
        retrain = is_certain and is_large
        reason = _reason(lost, difference, max_loss, is_certain=is_certain, is_large=is_large)
    return TargetChange(
        measured.prompt_set, measured.k, new, old, difference, is_paired, lost, retrain, reason
    )


def _reason(
    lost: float,
    difference: tuple[float, float, float],
    max_loss: float,
    *,
    is_certain: bool,
    is_large: bool,
) -> str:
    if lost <= 0:
        return "it accepts no less than before"
    share = f"{lost:.1%} of the accepted tokens per step are gone"
    if is_certain and is_large:
        return f"{share}, more than validate.max_loss={max_loss:g} allows"
    if is_certain:
        return f"{share}, within validate.max_loss={max_loss:g}"
    more = "; measure more prompts to be sure" if is_large else ""
    return f"{share}, which the choice of prompts explains: the interval holds 0{more}"


def _measure_old(config: Config, subject: Subject, measured: Measured) -> Measured:
    before = replace(subject, target_path=config.validate.old_target, _targets={}, _heads={})
    target = before.target(subject.runtime_dtype)
    wanted = subject.spec.target_fingerprint
    if target.fingerprint != wanted:
        raise ValueError(
            f"validate.old_target={config.validate.old_target}: is {target.fingerprint[:12]}, the "
            f"head was trained for {wanted[:12]}"
        )
    return measure_acceptance(
        target,
        before.head(subject.runtime_dtype),
        [generation.prompt_ids for generation in measured.generations],
        k=measured.k,
        max_tokens=measured.max_tokens,
        temperature=measured.temperature,
        engine_config=subject.engine_config,
        prompt_set=measured.prompt_set,
        seed=derive_seed(config.seed, "ladder"),
    )


def _recorded(subject: Subject, measured: Measured) -> MeasuredTau | None:
    file = subject.head_path / PARITY_NAME
    content: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    is_of_head = content.get("head_sha256") == subject.head_sha256
    if not is_of_head or content.get("target") != subject.spec.target_fingerprint:
        return None
    condition = {
        "prompt_set": measured.prompt_set,
        "k": measured.k,
        "temperature": measured.temperature,
        "draft_mode": measured.draft_mode,
        "max_tokens": measured.max_tokens,
        "prompts": measured.num_prompts,
    }
    for row in content.get("acceptance", ()):
        if all(row.get(key) == value for key, value in condition.items()):
            low, high = row["tau_interval"]
            source = f"{PARITY_NAME} beside the head"
            return MeasuredTau(content["target"], row["tau"], low, high, row["prompts"], source)
    return None


def _of(item: Measured, target: str, source: str) -> MeasuredTau:
    interval = item.tau_interval
    return MeasuredTau(
        target, item.acceptance.tau, interval.low, interval.high, item.num_prompts, source
    )

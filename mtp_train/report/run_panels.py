"""Panels about the run itself: training curves, time, data, features, events, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtp_train.console import format_duration
from mtp_train.report import formats
from mtp_train.report.charts import Point, Series, draw_curve, scale_for_losses, span
from mtp_train.report.facts import FeatureStore, Logbook, Stores, ValidationPoint
from mtp_train.report.svg import Scale, linear_scale
from mtp_train.report.view import Panel, Table


def training_panels(logbook: Logbook) -> tuple[Panel, ...]:
    return _losses(logbook), _taus(logbook), _rates(logbook)


def run_panels(logbook: Logbook, stores: Stores) -> tuple[Panel, ...]:
    return (
        _stages(logbook),
        _features(stores),
        _data(stores),
        _rejects(stores),
        _happenings(logbook),
        _exports(stores),
        _machine(stores),
        _settings(stores),
    )


def _losses(logbook: Logbook) -> Panel:
    title = "Loss"
    points = logbook.validations
    values = [point.loss for point in logbook.steps]
    values += [point.loss for point in points if point.loss is not None]
    if not values:
        return Panel(title)
    dots = tuple(
        Point(
            point.step,
            point.loss,
            f"step {point.step:,}: validation loss {formats.decimal(point.loss)}",
        )
        for point in points
        if point.loss is not None
    )
    drawing = draw_curve(
        [(point.step, point.loss) for point in logbook.steps],
        [Series("validation", dots, 0)],
        label="Training and validation loss over steps",
        x_title="step",
        y_title="loss",
        x=_steps_scale(logbook),
        y=scale_for_losses(values),
        curve_name="training",
    )
    lead = (
        "Mean over the positions in the loss. Validation: the same loss on rows that were held "
        "out, computed by the runtime."
    )
    return Panel(title, lead, drawing)


def _taus(logbook: Logbook) -> Panel:
    title = "Tokens per step during training"
    points = logbook.validations
    if not points:
        return Panel(title)
    best = [point for point in points if point.is_best]
    dots = tuple(
        Point(point.step, point.tau, _tip(point), is_marked=bool(best) and point is best[-1])
        for point in points
    )
    drawing = draw_curve(
        [],
        [Series("τ", dots, 0)],
        label="Tokens per step over training, measured by the runtime",
        x_title="step",
        y_title="τ",
        x=_steps_scale(logbook),
        y=linear_scale(*span([point.tau for point in points], least=0.1)),
    )
    lead = (
        f"Measured by the runtime, target and draft together{_of(points)}. Ring: the head that "
        "was kept."
    )
    return Panel(title, lead, drawing, _validation_table(points))


def _rates(logbook: Logbook) -> Panel:
    title = "Acceptance by position during training"
    points = [point for point in logbook.validations if point.rates]
    if not points:
        return Panel(title)
    k = min(len(point.rates) for point in points)
    series = [
        Series(
            str(j + 1),
            tuple(
                Point(
                    point.step,
                    point.rates[j],
                    f"step {point.step:,}, position {j + 1}: {formats.share(point.rates[j])}",
                )
                for point in points
            ),
            j,
        )
        for j in range(k)
    ]
    top = max(100 * point.rates[0] for point in points)
    scale = linear_scale(0.0, top * 1.08 or 1.0, unit="%")
    drawing = draw_curve(
        [],
        series,
        label="Share of drafts accepted up to each position over training",
        x_title="step",
        y_title="accepted up to position",
        x=_steps_scale(logbook),
        y=Scale(0.0, scale.high / 100, tuple((v / 100, text) for v, text in scale.ticks)),
    )
    return Panel(
        title, f"Share of drafts whose first j tokens were all accepted{_of(points)}.", drawing
    )


def _of(points: Sequence[ValidationPoint]) -> str:
    last = points[-1]
    if last.num_drafts is None or last.num_prompts is None:
        return ""
    return (
        f" ({last.num_prompts:,} prompts of the validation split, {last.num_drafts:,} drafts at "
        "the last point)"
    )


def _tip(point: ValidationPoint) -> str:
    rates = " ".join(formats.share(rate) for rate in point.rates)
    drafts = f", {point.num_drafts:,} drafts" if point.num_drafts is not None else ""
    return f"step {point.step:,}: τ {formats.decimal(point.tau)}{drafts}; by position {rates}"


def _validation_table(points: Sequence[ValidationPoint]) -> Table:
    rows = tuple(
        (
            f"{point.step:,}",
            formats.decimal(point.loss),
            formats.decimal(point.tau),
            " ".join(formats.share(rate) for rate in point.rates),
            formats.count(point.num_drafts),
            "best so far" if point.is_best else "",
        )
        for point in points
    )
    columns = ("step", "loss", "τ", "accepted by position", "drafts", "")
    return Table(columns, rows, frozenset({5}))


def _steps_scale(logbook: Logbook) -> Scale:
    steps = [point.step for point in logbook.steps] + [point.step for point in logbook.validations]
    return linear_scale(0.0, max(steps, default=1) * 1.02, count=4)


def _stages(logbook: Logbook) -> Panel:
    rows = [
        (
            stage.name,
            format_duration(stage.seconds),
            formats.decimal(stage.seconds / 3600, 2),
            formats.count(stage.world_size),
            str(stage.num_attempts),
            "finished" if stage.is_finished else "not finished",
        )
        for stage in logbook.stages
    ]
    total = sum(stage.seconds for stage in logbook.stages)
    if rows:
        rows.append(
            ("together", format_duration(total), formats.decimal(total / 3600, 2), "", "", "")
        )
    columns = ("stage", "wall time", "hours", "ranks", "attempts", "")
    return Panel(
        "Time per stage",
        "Over all attempts; one that was killed counts up to the last thing it logged.",
        table=Table(columns, tuple(rows), frozenset({0, 5})),
        is_open=True,
    )


def _features(stores: Stores) -> Panel:
    kinds: tuple[tuple[str, Callable[[FeatureStore], str]], ...] = (
        ("tokens", lambda store: formats.count(store.num_tokens)),
        ("on disk", lambda store: formats.data_size(store.num_bytes)),
        (
            "bytes per token",
            lambda store: formats.count(store.num_bytes // max(store.num_tokens, 1)),
        ),
        ("codec", lambda store: store.codec),
        ("hidden size", lambda store: formats.count(store.hidden_size)),
        ("shards", lambda store: formats.count(store.num_shards)),
        ("samples", lambda store: formats.count(store.num_samples)),
        ("quarantined", lambda store: formats.count(store.num_quarantined)),
        ("KL of the codec, nats", lambda store: formats.decimal(store.codec_kl, 4)),
    )
    found = stores.features
    rows = tuple((name, *(show(store) for store in found)) for name, show in kinds)
    columns = ("", *(store.split for store in found))
    return Panel(
        "Feature store",
        "The target's hidden states. KL: worst shard's mean, before against after the codec.",
        table=Table(columns, rows if found else ()),
        is_open=True,
        absent="no feature store in this run",
    )


def _data(stores: Stores) -> Panel:
    rows = tuple(
        (
            split.name,
            formats.count(split.num_rows),
            formats.count(split.num_tokens),
            formats.share(split.num_masked_tokens / split.num_tokens if split.num_tokens else None),
            formats.count(split.median_len),
            formats.count(split.max_len),
            formats.count(split.num_cut_off),
        )
        for split in stores.splits
    )
    columns = ("split", "rows", "tokens", "in the loss", "median length", "longest", "cut off")
    return Panel(
        "Token set", table=Table(columns, rows), is_open=True, absent="no token set in this run"
    )


def _rejects(stores: Stores) -> Panel:
    rows = tuple((name, formats.count(number)) for name, number in stores.rejects)
    lead = "Each with its reason in data/rejects.jsonl."
    if stores.beyond_limits:
        listed = ", ".join(f"{name} {formats.count(count)}" for name, count in stores.beyond_limits)
        lead += f" Not among them are those that were not needed: {listed}."
    return Panel(
        "Rows left out",
        lead,
        table=Table(("reason", "rows"), rows),
        is_open=True,
        absent="none recorded",
    )


def _happenings(logbook: Logbook) -> Panel:
    rows = tuple(
        (
            item.time.strftime("%Y-%m-%d %H:%M:%S") if item.time else "",
            item.stage,
            item.what,
        )
        for item in logbook.happenings
    )
    return Panel(
        "Events",
        f"Skipped steps ({logbook.num_skipped:,}), quarantines, restarts, resumes. Times in UTC.",
        table=Table(("time", "stage", "what"), rows, frozenset({0, 1, 2})),
        is_open=True,
        absent="nothing out of the ordinary was logged",
        is_broad=True,
    )


def _exports(stores: Stores) -> Panel:
    rows = tuple(
        (export.format, engine, command)
        for export in stores.exports
        for engine, command in (export.commands or (("", ""),))
    )
    return Panel(
        "Export",
        "TARGET, HEAD and K are to be filled in.",
        table=Table(("format", "engine", "command"), rows, frozenset({0, 1, 2})),
        is_open=True,
        absent="not exported",
        is_broad=True,
    )


def _machine(stores: Stores) -> Panel:
    rows = [("machine", text) for text in stores.machines]
    rows += [("commit", text) for text in stores.commits]
    rows += [(package.name, ", then ".join(package.versions)) for package in stores.packages]
    return Panel(
        "Machine and packages",
        table=Table(("what", "version"), tuple(rows), frozenset({0, 1})),
        absent="not recorded",
    )


def _settings(stores: Stores) -> Panel:
    return Panel(
        "Settings",
        "Those that explain the figures; all of them are in config.yaml.",
        table=Table(("key", "value"), stores.settings, frozenset({0, 1})),
        absent="not recorded",
    )

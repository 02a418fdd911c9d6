"""What a run is made of: token set, feature stores, exports, packages, machine, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from data_prep.conversation import BEYOND_LIMITS
from mtp_train.features.manifest import MANIFEST_NAME, load_manifest
from mtp_train.report.facts import (
    CoveragePart,
    Export,
    FeatureStore,
    Package,
    Stores,
    TokenSplit,
)
from mtp_train.report.json_values import mapping, number, text, whole
from mtp_train.run_dir import read_json

SPLITS = ("train", "validation")
# Settings that explain figures. Paths lose their folders: a report is passed on.
_SHOWN = (
    "target.path",
    "target.dtype",
    "data.sources",
    "data.regenerate.enabled",
    "data.max_tokens_total",
    "features.codec",
    "head.kind",
    "head.init",
    "head.concat",
    "head.recycle",
    "loss.kind",
    "loss.hidden_weight",
    "loss.logit_weight",
    "loss.num_unroll_steps",
    "loss.step_decay",
    "loss.sub_vocab_size",
    "trainer.epochs",
    "trainer.max_steps",
    "trainer.tokens_per_step",
    "trainer.learning_rate",
    "trainer.schedule",
    "trainer.dtype",
    "deepspeed.zero_stage",
    "validate.k",
    "validate.sets",
    "validate.max_tokens",
    "runtime.verify",
    "runtime.draft_mode",
    "seed",
)


def read_stores(root: Path, *, data: Path, features: Path, settings: Mapping[str, Any]) -> Stores:
    """Every part may be absent. Raises ``ValueError`` naming a damaged file.

    ``settings``: the run's recorded configuration.
    """
    statistics = _read(data / "statistics.json")
    versions = _read(root / "versions.json")
    stages = [mapping(entry) for entry in versions.values()]
    return Stores(
        splits=_splits(mapping(statistics.get("splits"))),
        rejects=_rejects(mapping(statistics.get("rejects")), beyond_limits=False),
        beyond_limits=_rejects(mapping(statistics.get("rejects")), beyond_limits=True),
        coverage=tuple(_coverage(mapping(mapping(statistics.get("splits")).get("train")))),
        features=tuple(
            _feature_store(name, features / name)
            for name in SPLITS
            if (features / name / MANIFEST_NAME).is_file()
        ),
        exports=tuple(_export(file) for file in sorted(root.glob("export/*/export.json"))),
        packages=_packages(mapping(stage.get("packages")) for stage in stages),
        machines=_unique(_machine(mapping(stage.get("machine"))) for stage in stages),
        commits=_unique(_commit(mapping(stage.get("git"))) for stage in stages),
        settings=tuple(_settings(settings)),
    )


def last_part(value: str) -> str:
    """The last part of a path; of anything else the text itself."""
    return PurePath(value).name or value


def _read(file: Path) -> Mapping[str, Any]:
    return read_json(file) if file.is_file() else {}


def _splits(content: Mapping[str, Any]) -> tuple[TokenSplit, ...]:
    found = []
    for name, value in content.items():
        split = mapping(value)
        lens = mapping(split.get("row_lens"))
        found.append(
            TokenSplit(
                name=name,
                num_rows=whole(split.get("num_rows")) or 0,
                num_tokens=whole(split.get("num_tokens")) or 0,
                num_masked_tokens=whole(split.get("num_masked_tokens")) or 0,
                num_cut_off=whole(split.get("num_cut_off")) or 0,
                median_len=whole(lens.get("p50")),
                max_len=whole(lens.get("max")),
            )
        )
    return tuple(found)


def _coverage(split: Mapping[str, Any]) -> Iterable[CoveragePart]:
    """Nothing for a set of an older version. A source's folders are left out."""
    for kind in ("domains", "prompt_scripts"):
        parts = {label: mapping(part) for label, part in mapping(split.get(kind)).items()}
        sums = {
            key: sum(whole(part.get(key)) or 0 for part in parts.values())
            for key in ("num_rows", "num_answer_tokens")
        }
        for label, part in parts.items():
            source, colon, domain = label.partition(": ")
            shares = [(whole(part.get(key)) or 0) / (sums[key] or 1) for key in sums]
            yield CoveragePart(kind, f"{last_part(source)}{colon}{domain}", shares[0], shares[1])


def _rejects(content: Mapping[str, Any], *, beyond_limits: bool) -> tuple[tuple[str, int], ...]:
    counted = [
        (name.replace("_", " "), whole(count) or 0)
        for name, count in content.items()
        if (name in BEYOND_LIMITS) == beyond_limits
    ]
    return tuple(sorted(counted, key=lambda item: -item[1]))


def _feature_store(split: str, path: Path) -> FeatureStore:
    manifest = load_manifest(path)
    losses = [shard.p0.codec_mean_kl for shard in manifest.shards if shard.p0 is not None]
    return FeatureStore(
        split=split,
        codec=manifest.fingerprint.codec,
        hidden_size=manifest.fingerprint.hidden_size,
        num_samples=manifest.num_samples,
        num_tokens=manifest.num_tokens,
        num_bytes=manifest.num_bytes,
        num_shards=len(manifest.shards),
        num_quarantined=len(manifest.quarantined),
        codec_kl=max(losses, default=None),
    )


def _export(file: Path) -> Export:
    content = read_json(file)
    commands = mapping(content.get("commands"))
    tensors = content.get("tensors")
    return Export(
        name=file.parent.name,
        format=text(content.get("format")) or file.parent.name,
        num_tensors=len(tensors) if isinstance(tensors, Mapping | list) else None,
        commands=tuple((name, text(command)) for name, command in commands.items()),
    )


def _packages(stages: Iterable[Mapping[str, Any]]) -> tuple[Package, ...]:
    found: dict[str, list[str]] = {}
    for packages in stages:
        for name, version in packages.items():
            seen = found.setdefault(name, [])
            if text(version) not in seen:
                seen.append(text(version))
    return tuple(Package(name, tuple(versions)) for name, versions in found.items())


def _machine(content: Mapping[str, Any]) -> str:
    memory = number(content.get("memory_bytes"))
    parts = [
        text(content.get("processor")),
        f"{content['cores']} cores" if content.get("cores") else "",
        f"{memory / 1e9:.0f} GB" if memory else "",
        text(content.get("system")),
        f"Python {content['python']}" if content.get("python") else "",
    ]
    return ", ".join(part for part in parts if part)


def _commit(content: Mapping[str, Any]) -> str:
    commit = text(content.get("commit"))[:10]
    return f"{commit} with local changes" if commit and content.get("dirty") is True else commit


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))


def _settings(content: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for path in _SHOWN:
        value: Any = content
        for part in path.split("."):
            value = mapping(value).get(part)
        if value is None:
            continue
        shown = [_show(item) for item in (value if isinstance(value, list) else [value])]
        yield path, ", ".join(shown)


def _show(value: Any) -> str:
    if isinstance(value, str):
        return last_part(value)
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Damaged exports of every layout but ``mimo`` (see ``test_export.py``) are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import pytest

from mtp_train.config import ExportFormat
from mtp_train.export import check_export, write_export
from tests.unit.export.tampers import TAMPERS_OF
from tests.unit.export.test_eagle_layouts import make_target, put_head
from tests.unit.foreign.heads import KINDS
from tests.unit.native.test_native import export, random_native

CASES = [(format, name) for format, tampers in TAMPERS_OF.items() for name in tampers]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports by layout, each beside its ``target``."""
    made = {}
    for format in TAMPERS_OF:
        path = tmp_path_factory.mktemp(format)
        if format == "deepseek":
            random_native(path, "deepseekv3")
            made[format] = export(path, "deepseekv3")
            continue
        target = make_target(path / "target", num_layers=7)
        fields, ids = KINDS[format]
        put_head(path / "head", target, fields, ids=ids)
        made[format] = path / "out" / format
        write_export(
            path / "head",
            made[format],
            format=format,  # type: ignore[arg-type]
            target_dir=path / "target",
            unvalidated=True,
        )
    return made


@pytest.mark.parametrize(("format", "name"), CASES)
def test_damage_is_refused_by_name(
    format: str, name: str, places: dict[str, Path], tmp_path: Path
) -> None:
    intact = places[format]
    target = intact.parent.parent / "target"
    check_export(intact, target_dir=target)
    damaged = tmp_path / "out"
    shutil.copytree(intact, damaged)
    tamper = TAMPERS_OF[format][name]
    tamper.apply(damaged)
    with pytest.raises(ValueError, match=r".") as caught:
        check_export(damaged, target_dir=target)
    assert tamper.named in str(caught.value)


def test_no_layout_is_left_out() -> None:
    assert {*TAMPERS_OF, "mimo", "medusa", "eagle_sglang"} == set(get_args(ExportFormat))

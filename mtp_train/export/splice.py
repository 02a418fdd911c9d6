"""An exported MTP directory put into a copy of its target, which then holds the head as its own.

Engines then need no draft directory: the target's own MTP weights are what they draft with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_train.export.reader import check_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.export.weights import read_weights
from mtp_train.native.names import layout_of
from mtp_train.native.splice import Splice, splice_into_copy
from mtp_train.serving.target_scope import plain_draft_layer
from runtime.models.config import load_config


def splice_export(export: Path, target_dir: Path, out_dir: Path) -> Splice:
    """A copy of the target in ``out_dir`` whose MTP weights are those of the directory ``export``.

    The head stays plain: ``quantization_config`` of a quantised target leaves its layer out. Raises
    ``ValueError`` for an export that is damaged or of another target, or whose layout is not that
    of this target's family.
    """
    check_export(export, target_dir=target_dir)
    record = ExportRecord.read(export / EXPORT_NAME)
    target = load_config(target_dir)
    if record.format != layout_of(target):
        raise ValueError(
            f"export.copy_to with export.format={record.format}: a checkpoint of "
            f"{target.architecture} has no place for it; DeepSeek targets hold export.format="
            "deepseek, MiMo targets mimo. Nearest: serve the directory beside the target"
        )
    prefix = target.native_prefix(0)
    tensors = {
        name: tensor for name, tensor in read_weights(export).items() if name.startswith(prefix)
    }
    config: dict[str, Any] = {
        "num_nextn_predict_layers": 1,
        **plain_draft_layer(target_dir, stored=prefix),
    }
    return splice_into_copy(target_dir, out_dir, tensors, replaces=prefix, config=config)

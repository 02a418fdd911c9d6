"""Features from decoding: the hidden states of regenerated answers, kept as they are computed.

`data_prep` knows nothing of features; this is the sink that the command line hands it. A sample
that was still in memory when the process died is computed again by `mtp precompute`, which also
skips whatever lies in the store already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from data_prep.answering import HiddenSink
from data_prep.normalise import Split
from data_prep.token_set import TokenRow
from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup
from mtp_train.features.target import fingerprint_features
from mtp_train.features.workbench import Workbench
from mtp_train.features.writer import (
    FeatureWriter,
    NonFiniteError,
    allowed_nonfinite,
    finish_store,
    lock_store,
    recover_store,
)
from mtp_train.run_dir import RunDirectory
from runtime.request import HiddenRows

_SPLITS: tuple[Split, ...] = ("train", "validation")


@contextmanager
def open_capture(
    config: Config, directory: Path, bench: Workbench, *, group: ProcessGroup
) -> Iterator[HiddenSink]:
    """A sink into the run's feature stores (leader only), with P0 checked shard by shard.

    ``directory`` is the target's. Decoding computes no state for a row's last token, so that
    token is not stored. Raises :class:`NonFiniteError` at the end when more than
    ``features.max_nonfinite_share`` of the samples had to be quarantined.
    """
    features = RunDirectory.from_config(config).features
    fingerprint = fingerprint_features(config, directory, device=group.device)
    writers: dict[Split, FeatureWriter] = {}
    num_added = dict.fromkeys(_SPLITS, 0)

    def sink(rows: HiddenRows, row: TokenRow, split: Split) -> None:
        count = len(rows.token_ids)
        assert rows.token_ids == row.input_ids[:count], "the states are those of the row's tokens"
        num_added[split] += 1
        writers[split].add(
            row.sample_id,
            row.input_ids[:count],
            row.loss_mask[:count],
            rows.hidden_TD,
            rows.layers_TE,
        )

    with ExitStack() as stack:
        for split in _SPLITS:
            store = features / split
            stack.enter_context(lock_store(store))
            manifest = recover_store(store, fingerprint)
            stack.callback(finish_store, store)
            writers[split] = stack.enter_context(
                FeatureWriter(
                    store,
                    fingerprint=fingerprint,
                    shard_tokens=config.features.shard_tokens,
                    max_quarantined=sys.maxsize,  # a share of what is not known yet: see below
                    known=manifest.settled_ids(),
                    check=bench.check,
                )
            )
        yield sink
    share = config.features.max_nonfinite_share
    for split, writer in writers.items():
        if writer.num_quarantined > allowed_nonfinite(share, num_added[split]):
            raise NonFiniteError(
                f"{features / split}: {writer.num_quarantined} of {num_added[split]} samples have "
                f"non-finite hidden states (features.max_nonfinite_share={share})"
            )

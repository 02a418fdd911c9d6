"""What a run was made of: fingerprints of its target, token set, features and head.

Read from what the stages left, never computed from settings: an entry is absent while its stage has
not finished.
"""

from __future__ import annotations

from mtp_train.config import Config
from mtp_train.run_dir import RunDirectory


def run_fingerprints(config: Config) -> dict[str, str]:
    """Names to hex digests, for ``versions.json``. The target's own is always there.

    Raises ``ValueError`` when the target is missing or a record is damaged.
    """
    from data_prep.token_set import read_fingerprint
    from mtp_train.export.weights import hash_files
    from mtp_train.features.manifest import MANIFEST_NAME, load_manifest
    from mtp_train.features.target import cache_directory, target_directory
    from runtime.head_spec import CONFIG_NAME, WEIGHTS_NAME
    from runtime.models.loader import fingerprint_target

    run = RunDirectory.from_config(config)
    directory = target_directory(config.target)
    found = {"target": fingerprint_target(directory, cache_dir=cache_directory(config.target))}
    token_set = read_fingerprint(run.data)
    if token_set is not None:
        found["token_set"] = token_set["fingerprint"]
        for name in ("tokenizer", "chat_template"):
            found[name] = token_set["inputs"][name]
    for split in ("train", "validation"):
        if (run.features / split / MANIFEST_NAME).is_file():
            manifest = load_manifest(run.features / split)
            found[f"features_{split}"] = manifest.fingerprint.digest()
    if all((run.head / name).is_file() for name in (CONFIG_NAME, WEIGHTS_NAME)):
        found |= {f"head_{name}": digest for name, digest in hash_files(run.head).items()}
    return found

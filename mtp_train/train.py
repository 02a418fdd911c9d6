"""`mtp train`: features to a draft head. Also `torchrun -m mtp_train.train`."""

from __future__ import annotations

from mtp_train.app import run_command
from mtp_train.stages import run_train


def main() -> None:
    run_command("train", run_train)


if __name__ == "__main__":
    main()

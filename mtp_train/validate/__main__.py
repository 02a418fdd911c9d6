"""`mtp validate`: a head, checked and measured. Also `torchrun -m mtp_train.validate`."""

from __future__ import annotations

from mtp_train.app import run_command
from mtp_train.stages import run_validate


def main() -> None:
    run_command("validate", run_validate)


if __name__ == "__main__":
    main()

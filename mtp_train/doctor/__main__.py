"""`mtp doctor`. Also `python -m mtp_train.doctor`."""

from __future__ import annotations

import sys

from mtp_train.app import run_command
from mtp_train.doctor.command import run_doctor, take_flags


def main() -> None:
    stage, sys.argv[1:] = take_flags(run_doctor, sys.argv[1:])
    run_command("doctor", stage)


if __name__ == "__main__":
    main()

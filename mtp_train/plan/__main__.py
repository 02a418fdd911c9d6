"""`mtp plan`. Also `python -m mtp_train.plan`."""

from __future__ import annotations

import sys

from mtp_train.app import run_command
from mtp_train.plan.command import run_plan, take_flags


def main() -> None:
    stage, sys.argv[1:] = take_flags(run_plan, sys.argv[1:])
    run_command("plan", stage)


if __name__ == "__main__":
    main()

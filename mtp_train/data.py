"""`mtp data`: prompts to token sets. Also `python -m mtp_train.data`."""

from __future__ import annotations

from mtp_train.app import run_command
from mtp_train.stages import run_data


def main() -> None:
    run_command("data", run_data)


if __name__ == "__main__":
    main()

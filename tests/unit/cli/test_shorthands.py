import subprocess
import sys

import pytest

from mtp_train.shorthands import expand_shorthands


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("demo", "recipe=long", "experiment=long"),
        ("export", "format=mimo", "export.format=mimo"),
        ("data", "regenerate.url=[http://a/v1]", "data.regenerate.url=[http://a/v1]"),
        ("data", "regenerate.enabled=true", "data.regenerate.enabled=true"),
        ("data_check_render", "url=http://a/v1", "check_render.url=http://a/v1"),
        ("data", "url=http://a/v1", "url=http://a/v1"),
        ("train", "format=mimo", "format=mimo"),
        ("data", "data.sources=[format=a]", "data.sources=[format=a]"),
        ("data", "--help", "--help"),
        ("data", "recipe", "recipe"),
    ],
)
def test_only_the_key_of_an_override_is_spelled_out(
    command: str, given: str, expected: str
) -> None:
    assert expand_shorthands(command, [given]) == [expected]


def test_a_command_composes_with_a_shorthand() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtp_train.cli", "demo", "recipe=long", "--cfg", "job"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "name: long" in done.stdout

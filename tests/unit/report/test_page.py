"""The page as text: complete, escaped, without requests, and without texts when asked."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest

from mtp_train import stages
from mtp_train.config import Config, ReportConfig
from mtp_train.report.page import write_page
from mtp_train.settings import load_config
from tests.unit.report.run_fixture import SECRET, write_run

_VOID = {"meta", "link", "br", "img", "circle", "rect", "line", "path", "polyline"}
_LOADING = {"src", "srcset", "data", "action", "poster", "background"}


class Outline(html.parser.HTMLParser):
    """Tags, texts and attributes of a page; fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.text += f"{data} "


def page_of(root: Path, config: ReportConfig | None = None) -> tuple[str, Outline]:
    file = root / "report.html"
    write_page(root, file, config or ReportConfig())
    content = file.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(content)
    outline.close()
    assert outline._open == []
    return content, outline


def make_config(root: Path, **report: object) -> Config:
    return load_config(
        {
            "run": {"name": root.name, "root": str(root.parent)},
            "target": {"path": ""},
            "report": report,
        }
    )


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    _, outline = page_of(write_run(tmp_path / "r"))
    assert outline.tags.count("script") == 1  # the page's own
    assert "img" not in outline.tags
    assert not [name for _, name, _ in outline.attributes if name.startswith("on")]
    # in a note, a prompt, a token, the training row, a task's label, a tip and the target's name
    assert outline.text.count('<script>alert("x")') >= 15
    assert any('<script>alert("x")' in v for _, n, v in outline.attributes if n == "data-tip")


def test_a_hostile_name_of_a_run_stays_text(tmp_path: Path) -> None:
    _, outline = page_of(write_run(tmp_path / '"><script>alert(1)<'))
    assert outline.tags.count("script") == 1


def test_nothing_is_fetched_and_nothing_else_can_run(tmp_path: Path) -> None:
    content, outline = page_of(write_run(tmp_path / "r"))
    assert not [tag for tag in outline.tags if tag in ("iframe", "object", "embed", "base")]
    assert [(t, n) for t, n, _ in outline.attributes if n in _LOADING] == []
    links = [v for _, name, v in outline.attributes if name in ("href", "xlink:href")]
    assert all(value.startswith(("#", "data:")) for value in links)
    assert "http:" not in content
    assert "https:" not in content
    assert re.findall(r"@import|url\(", content) == []
    policy = next(v for _, n, v in outline.attributes if n == "content" and "default-src" in v)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_the_policy_names_the_script_that_is_there(tmp_path: Path) -> None:
    import base64
    import hashlib

    content, _ = page_of(write_run(tmp_path / "r"))
    script = content.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in content


def test_without_samples_no_customer_text_is_in_the_page(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    assert SECRET in page_of(root)[0]
    content, outline = page_of(root, ReportConfig(samples=False))
    assert SECRET not in content
    assert "left out (report.samples=false)" in outline.text
    assert (root / "samples.json").is_file()  # a report changes nothing but itself


def test_the_number_of_samples_is_limited(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    assert page_of(root)[0].count('<article class="sample">') == 3 + 1
    assert page_of(root, ReportConfig(max_samples=1))[0].count('<article class="sample">') == 1 + 1


def test_tokens_carry_their_origin_in_class_words_and_line(tmp_path: Path) -> None:
    content, outline = page_of(write_run(tmp_path / "r"))
    for position in (1, 2, 3):
        tip = f"drafted at position {position}, accepted"
        assert f'<i class="d{position}" data-tip="{tip}"> word{position}</i>' in content
        assert f"drafted, position {position}" in outline.text
        style = re.search(rf"^\.d{position} {{ .*text-decoration-style: (\w+)", content, re.M)
        assert style, "underlines tell positions apart without colour"
    assert "The<i " in content  # the target's own token is plain


def test_every_part_has_its_figures_with_interval_and_number(tmp_path: Path) -> None:
    _, outline = page_of(write_run(tmp_path / "r"))
    text = re.sub(r"\s+", " ", outline.text)
    for wanted in (
        "Ship, with K = 3, at batch 1",
        "2.021 tokens per step [1.995, 2.047] MT-Bench · K = 3 · greedy, arg-max drafts 6,491",
        "2.010 tokens per step [1.980, 2.040]",
        "2.009 tokens per step 2.004 here, same prompts vllm 0.32.0 · MT-Bench · K = 3 6,480",
        "MT-Bench, vllm 0.32.0 (float32)",
        "1.22× of plain decoding [1.14, 1.30]",
        "slower than plain decoding",
        "best: K = 3, 1.22× at batch 1",
        "highest lower end of 7 cells · 16 runs each",
        "8 × 2",
        "23,040 B",
        "fp8_e4m3",
        "0.0043",
        "vllm serve TARGET",
        "2.13.0, then 2.14.0",
        "step 88 skipped",
        "answer too long",
        "not needed: token budget 81,234.",
        "128–256 tokens",
    ):
        assert wanted in text, wanted
    assert "nan" not in text.lower().replace("quarantined", "")


def test_an_empty_run_says_not_measured_everywhere(tmp_path: Path) -> None:
    root = tmp_path / "fresh"
    root.mkdir()
    (root / "config.yaml").write_text("run: {name: fresh}\n")
    _, outline = page_of(root)
    assert "Not proven yet" in outline.text
    assert outline.text.count("not measured") >= 6
    assert outline.text.count("not run") >= 7
    assert outline.tags.count("svg") == 0


def test_figures_that_are_no_numbers_are_dashes(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    content = json.loads((root / "parity.json").read_text())
    for row in (*content["speed"], *content["acceptance"], *content["breakdown"]):
        row |= {"speedup": "nan", "tau": "nan", "low": "inf", "rates": ["nan"]}
        row |= {"tau_interval": None, "rate_intervals": None, "conditional_rates": []}
    (root / "parity.json").write_text(json.dumps(content))
    text = page_of(root)[1].text
    assert "not measured" in text
    assert "nan" not in text.lower().replace("quarantined", "")


def test_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    content = json.loads((root / "samples.json").read_text())
    content["samples"][0]["tokens"][0]["text"] = "half \ud83d"
    (root / "samples.json").write_text(json.dumps(content))
    assert "half ?" in page_of(root)[0]


def test_report_command_writes_the_file_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_run(tmp_path / "mine")
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    assert stages.run_report(make_config(root, samples=False)) == 0
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
    after = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    assert SECRET not in after.pop(root / "report.html").decode()
    assert after == before


def test_a_report_is_small_enough_to_mail(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    page_of(root)
    assert (root / "report.html").stat().st_size < 400_000

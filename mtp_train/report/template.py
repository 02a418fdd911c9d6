"""A template filled in: one file of HTML, no request to anywhere.

A content security policy names the hash of the one script, so that text which slipped through
escaping could still not run.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from importlib.resources import files
from typing import Any


def render_template(name: str, *, now: datetime.datetime | None = None, **values: Any) -> str:
    """``name`` of ``report/templates`` with style and script in it. ``now`` is what the footer
    says.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mtp_train.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _asset("page.js")
    html = environment.get_template(name).render(
        **values,
        style=_asset("page.css"),
        script=script,
        script_hash=_csp_hash(script),
        written=(now or datetime.datetime.now(datetime.UTC)).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return html.encode("utf-8", "replace").decode()  # lone surrogates cannot be written


def _asset(name: str) -> str:
    return (files("mtp_train.report") / "templates" / name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""Settings as Hydra overrides: ``key=value`` texts that Hydra's parser reads back unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# A text that Hydra reads as this text and not as a number, a truth value or nothing.
_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][A-Za-z0-9_/.-]*", re.IGNORECASE)
FREE_MAPPINGS = ("data.chat_template_kwargs", "engine.args")  # their keys are the user's


def override(key: str, value: Any) -> str:
    """``key=value`` for a scalar, a list or ``None``; not yet quoted for a shell."""
    return f"{key}={_text(value)}"


def overrides_between(defaults: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What has to be said to come from ``defaults`` to ``wanted`` (nested values), in the order of
    ``wanted``. A key that the defaults lack is added with ``+``.
    """
    before = dict(leaves(defaults))
    found = []
    for key, value in leaves(wanted):
        if key in FREE_MAPPINGS:
            entries = value if isinstance(value, Mapping) else {}
            known = before.get(key) or {}
            found += [
                override(f"{'' if name in known else '+'}{key}.{name}", item)
                for name, item in entries.items()
                if name not in known or known[name] != item
            ]
            found += [f"~{key}.{name}" for name in known if name not in entries]
        elif key not in before:
            found.append(override(f"+{key}", value))
        elif before[key] != value:
            found.append(override(key, value))
    return found


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every setting; a mapping with free keys is one value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in FREE_MAPPINGS:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    # OmegaConf reads ${...} as a reference inside of quotes as well
    return QuotedString(text=text.replace("${", "\\${"), quote=Quote.single).with_quotes()

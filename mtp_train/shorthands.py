"""Short spellings of settings that are typed often: ``mtp export format=mimo``.

A shorthand is nothing but its long form: errors, ``config.yaml`` and sweeps know that one only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

EVERYWHERE: Mapping[str, str] = MappingProxyType({"recipe": "experiment"})
BY_COMMAND: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "data": {"regenerate": "data.regenerate"},
        "data_check_render": {"url": "check_render.url", "rows": "check_render.rows"},
        "hot_vocab": {"sizes": "hot_vocab.sizes", "k": "validate.k"},
        "export": {"format": "export.format"},
        "compare": {name: f"compare.{name}" for name in ("baseline", "set", "k", "html", "json")},
        "reproduce": {name: f"reproduce.{name}" for name in ("name", "root", "json")},
        "bench": {
            name: f"bench.{name}"
            for name in (
                *("url", "heads", "k", "concurrency", "prompts", "num_prompts", "max_tokens"),
                *("rounds", "servers", "model", "out", "svg"),
            )
        },
        "doctor": {"json": "doctor.json", "measure": "doctor.measure"},
        "inspect": {
            "target": "target.path",
            "as": "foreign.format",
            "json": "inspect.json",
        },
        "plan": {
            "target": "target.path",
            "tokens": "data.max_tokens_total",
            **{name: f"plan.{name}" for name in ("hardware", "calibrate", "json")},
        },
        "generate": {
            name: f"generate.{name}"
            for name in (
                *("k", "max_tokens", "temperature", "raw", "compare", "json"),
                *("draft_model", "draft_layers"),
            )
        },
    }
)


# A group of the same name as a shorthand: its options keep their meaning.
_GROUP_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType({"target": ("local", "smollm2")})


def expand_shorthands(command: str, arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the shorthands of ``command`` spelled out.

    Only the key of an override is looked at (its first part where it is dotted), never a value.
    """
    known = {**EVERYWHERE, **BY_COMMAND.get(command, {})}
    return [_expand(argument, known) for argument in arguments]


def _expand(argument: str, known: Mapping[str, str]) -> str:
    key, equals, value = argument.partition("=")
    first, dot, rest = key.partition(".")
    if not equals or first not in known:
        return argument
    # target=NAME, where target is a section and a group as well
    is_section = known[first].startswith(f"{first}.")
    if is_section and (dot or value in _GROUP_OPTIONS.get(first, ())):
        return argument
    return f"{known[first]}{dot}{rest}={value}"

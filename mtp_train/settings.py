"""Plain YAML values into the frozen dataclasses of :mod:`mtp_train.config`, strictly.

Everything a user can get wrong before work begins is found here: unknown keys, wrong types, values
out of range, settings that exclude each other. Each is one :class:`ConfigError` that names the
field, the value and what is allowed. Imports nothing heavy, so that a typo costs no waiting.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mtp_train.config import WHY_NOT, Config, get_field
from mtp_train.errors import ConfigError
from mtp_train.rules import check_config

__all__ = [
    "ConfigError",
    "get_field",
    "known_keys",
    "load_config",
    "unknown_key_message",
]

MISSING = "???"  # OmegaConf's mark of a value that the user has to give


def load_config(raw: Mapping[str, Any]) -> Config:
    """Validate nested plain values into a :class:`Config`.

    Raises :class:`ConfigError` for the first thing that is wrong.
    """
    try:
        config: Config = _build(Config, raw, "")
        check_config(config)
    except ConfigError:
        raise
    except ValueError as error:  # a dataclass's own checks, and those of data_prep
        raise ConfigError(str(error)) from error
    return config


def known_keys(cls: type[Any] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the configuration, sections included, in declaration order."""
    keys: list[str] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        keys.append(prefix + field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            section = typing.cast(type[Any], hints[field.name])
            keys += known_keys(section, f"{prefix}{field.name}.")
    return keys


def unknown_key_message(key: str) -> str:
    """``key: unknown key; did you mean …?`` with the closest known keys, or the section's keys."""
    section, _, last = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known_keys() if k.rpartition(".")[0] == section]
    close = [f"{section}.{name}".strip(".") for name in difflib.get_close_matches(last, siblings)]
    if not close:  # right name in the wrong section, or a misspelt section
        same_name = [k for k in known_keys() if k.rpartition(".")[2] == last]
        close = same_name[:3] or difflib.get_close_matches(key, known_keys(), cutoff=0.8)
    if close:
        return f"{key}: unknown key; did you mean {_join_or(close)}?"
    return f"{key}: unknown key; {section or 'the configuration'} has {', '.join(siblings)}"


def _build(cls: type[Any], raw: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}={raw!r}: expected a section with keys, got {_kind(raw)}")
    hints = typing.get_type_hints(cls)
    prefix = f"{where}." if where else ""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise ConfigError(unknown_key_message(f"{prefix}{key}"))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        path = prefix + name
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if name not in raw and required and dataclasses.is_dataclass(hints[name]):
            values[name] = _build(typing.cast(type[Any], hints[name]), {}, path)
        elif raw.get(name) == MISSING or (name not in raw and required):
            raise ConfigError(f"{path}: not set; give it a value, as in {path}={_example(path)}")
        elif name in raw:
            values[name] = _convert(hints[name], raw[name], path)
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, where)
    if origin is Literal:
        return _convert_choice(args, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if hint is float and type(value) is int:
        return float(value)
    if hint is str and type(value) is int:  # run.name=7
        return str(value)
    if type(value) is not hint:
        raise ConfigError(f"{where}={value!r}: expected {_KINDS[hint]}, got {_kind(value)}")
    return value


def _convert_choice(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    allowed = ", ".join(map(str, choices))
    if (where, value) in WHY_NOT:
        raise ConfigError(f"{where}={value}: {WHY_NOT[where, value]}; allowed are {allowed}")
    close = difflib.get_close_matches(str(value), list(map(str, choices)), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{where}={value}: allowed are {allowed}{hint}")


def _convert_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    pairs = args[-1] is Ellipsis and typing.get_origin(args[0]) is tuple
    if isinstance(value, Mapping) and pairs:
        value = [
            [key, item if isinstance(item, str) else json.dumps(item)]
            for key, item in value.items()
        ]
    if not isinstance(value, list | tuple):
        expected = "a mapping" if pairs else "a list"
        example = f"{where}={{a: b}}" if pairs else f"{where}=[{value}]"
        raise ConfigError(
            f"{where}={value!r}: expected {expected}, got {_kind(value)}; write {example}"
        )
    if args[-1] is Ellipsis:
        hints: Iterable[Any] = [args[0]] * len(value)
    elif len(value) != len(args):
        raise ConfigError(f"{where}={list(value)}: expected {len(args)} values, got {len(value)}")
    else:
        hints = args
    return tuple(_convert(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value)))  # noqa: B905


_KINDS: Mapping[Any, str] = types.MappingProxyType(
    {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        list: "a list",
        tuple: "a list",
        dict: "a section with keys",
        type(None): "null",
    }
)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _example(path: str) -> str:
    examples = {
        "run.name": "my-head",
        "target.path": "/models/my-llama",
        "data.sources": "[my.jsonl]",
    }
    return examples.get(path, "...")


def _join_or(names: list[str]) -> str:
    return " or ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} or {names[-1]}"

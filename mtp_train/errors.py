"""Exceptions that are verdicts and not faults; their messages are for the user as they are."""

from __future__ import annotations


class StageRefusedError(RuntimeError):
    """A stage stopped because its result could not be trusted; the message is for the user."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is meant for the user as it is."""

"""The one exception that is a verdict and not a fault."""

from __future__ import annotations


class StageRefusedError(RuntimeError):
    """A stage stopped because its result could not be trusted; the message is for the user."""

"""An answer on the terminal: each token in the colour of how it came to be.

Colours where the terminal has them; elsewhere (a pipe, ``NO_COLOR``) the text and nothing but it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from runtime.detokenize import PieceDecoder

if TYPE_CHECKING:
    from rich.console import Console

    from runtime.detokenize import Decode
    from runtime.request import TokenEvent

# By position in the draft; the last one serves all that follow. Legible on light and dark.
_STYLES = ("green", "cyan", "magenta", "blue", "yellow", "red")
_ORDINALS = ("1st", "2nd", "3rd")
_SHOWN_CONTROLS = {ord("\n"), ord("\t")}


def style_of(position: int) -> str:
    """rich style of a token accepted at ``position`` (from 1); 0: the target's own."""
    return _STYLES[min(position, len(_STYLES)) - 1] if position else ""


class TokenPrinter:
    """Writes the tokens of one answer as they come."""

    def __init__(self, console: Console, decode: Decode) -> None:
        self._console = console
        self._text = PieceDecoder(decode)
        self._has_colours = console.is_terminal and not console.no_color
        self._ended_line = True

    def print_legend(self, console: Console, k: int) -> None:
        """One line that explains the colours, where there are any."""
        if not self._has_colours:
            return
        legend = Text("the target's own · drafted and accepted as")
        for position in range(1, min(k, len(_STYLES)) + 1):
            name = _ORDINALS[position - 1] if position <= len(_ORDINALS) else f"{position}th"
            more = "+" if position == len(_STYLES) < k else ""
            legend.append(" ").append(name + more, style=style_of(position))
        console.print(legend)

    def write(self, event: TokenEvent) -> None:
        """The event's tokens; a character split over tokens appears with the one that ends it."""
        for index, token in enumerate(event.token_ids):
            position = index + 1 if index < event.num_accepted else 0
            self._write(self._text.push(token), style_of(position))
        self._console.file.flush()

    def finish(self) -> None:
        """What was held back, and a line end."""
        self._write(self._text.flush(), "")
        if not self._ended_line:
            self._console.file.write("\n")
        self._console.file.flush()

    def _write(self, piece: str, style: str) -> None:
        if not piece:
            return
        self._ended_line = piece.endswith("\n")
        if not self._console.is_terminal:
            self._console.file.write(piece)
            return
        shown = Text(_without_controls(piece), style=style if self._has_colours else "")
        self._console.print(shown, end="", soft_wrap=True)


def _without_controls(text: str) -> str:
    """A model may write escape sequences; a terminal must not obey them."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if _is_control(ord(character)) else character
        for character in text
    )


def _is_control(code: int) -> bool:
    is_c0 = code < 0x20 and code not in _SHOWN_CONTROLS
    return is_c0 or 0x7F <= code < 0xA0

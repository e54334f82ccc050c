"""Text of an unfinished response that can be sent already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl.agents.parsers.base import settled
from verl.datasets.chat import common_prefix_length


class StreamedText:
    """The content of one answer, sent piece by piece.

    Args:
        read: returns the text of the drawn tokens, outside of calls and thoughts.
        stop: texts that end an answer, and are no part of it.
        send: takes each new piece.
    """

    def __init__(self, read: Callable[[list[int]], str], stop: Sequence[str], send: Callable[[str], object]) -> None:
        self._read, self._stop, self._send = read, stop, send
        self.sent = ""

    def take(self, token_ids: list[int]) -> None:
        """Send what further tokens cannot change any more, of all tokens drawn so far."""
        text = settled(cut(self._read(token_ids), self._stop)[0], self._stop)
        new = text[len(self.sent) :]
        if new and text.startswith(self.sent):
            self.sent = text
            self._send(new)

    def completed(self, content: str) -> str:
        """Return the content of the whole answer as the client gets it: with the pieces that were sent at its front.

        They are the beginning of ``content``, but for blanks that a parser strips, and for thoughts of a model that
        ends them without having begun them: those were taken for content until their end was drawn.
        """
        for sent in (self.sent, self.sent.lstrip()):
            if content.startswith(sent):
                return self.sent + content[len(sent) :]
        return self.sent + content[common_prefix_length(self.sent, content) :]


def cut(content: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Cut a text before the first of the stop texts in it; return that too."""
    matches = [(content.index(text), -len(text), text) for text in stop if text in content]
    if not matches:
        return content, None
    position, _, text = min(matches)
    return content[:position], text

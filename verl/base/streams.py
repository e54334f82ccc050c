"""Standard input, output and error of this process."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open standard input, output and error on the null device if this process was started without them.

    Otherwise the next file or socket would get one of their descriptors and be read or written in their place.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  (stays open; the descriptor may be another file's by now)
            setattr(sys, name, stream)


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Replace characters that cannot be seen, or turn the direction of text, by their codes.

    A terminal executes the control characters in texts of models and files: some write the clipboard.

    >>> printable("\x1b]52;c;cm0=\x07")
    '[U+001B]]52;c;cm0=[U+0007]'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else f"[U+{ord(character):04X}]" for character in text
    )

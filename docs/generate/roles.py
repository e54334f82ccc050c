"""References of docstrings (``:meth:`run` ``) as code, for the pages of docs/api that mkdocstrings makes."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """An extension of mkdocstrings' reader of Python."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the references in one docstring."""
        del kwargs
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)

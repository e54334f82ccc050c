"""Types that several packages write in their signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A JSON object: a message, a tool's arguments or description, the settings of a tool, the body of a request.

Its values are ``Any`` and not ``object``: type checkers then let a reader index into nested values, as they do with the
result of ``json.loads``.
"""

JsonMapping = Mapping[str, Any]
"""A JSON object that the receiver does not change."""

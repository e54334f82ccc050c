"""The configuration keys behind the arguments that an error names.

The library names what its caller wrote: the argument of a function, or a key of the section that it was given. On the
command line the same thing has a longer name, ``data.max_prompt_length`` for ``max_prompt_length``.
"""

from __future__ import annotations

import re

from verl.config import BaseConfig
from verl.trainer.config.keys import keys_of

# `name=value`, or a name that no English word could be; with the sections that the message gives before it.
_SETTING = re.compile(r"(?<![\w./'-])(?:[a-z]\w*\.)*(?:[a-z]\w*(?==[^=])|[a-z]\w*_\w+)(?![\w/(])")
MOST = 4
"""Number of keys behind one name; of a name that more keys share, such as ``name``, none is told."""


def keys_named(text: str, root: type[BaseConfig]) -> list[str]:
    """Return the keys of a configuration that a message names without their sections, in the order of the message."""
    if text.partition("\n")[0].endswith("in the configuration:"):  # a report, which has the whole keys
        return []
    known = keys_of(root).keys()
    found: dict[str, None] = {}
    for name in dict.fromkeys(_SETTING.findall(text)):
        longer = [path for path in known if path.endswith(f".{name}")]
        if name not in known and len(longer) <= MOST and not any(path in text for path in longer):
            found |= dict.fromkeys(sorted(longer))
    return list(found)

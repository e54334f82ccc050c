"""All uses of private interfaces of OmegaConf.

``tests/trainer/config/test_omegaconf_private.py`` fails on a version of OmegaConf that changed one of them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import yaml
from omegaconf import _utils, base, omegaconf

plain_loader, plain_dumper = _utils.get_yaml_loader, _utils.get_omega_conf_dumper
parsed_once = lru_cache(maxsize=1024)(base.parse)
"""Parses ``${...}``; its trees are only read, and a configuration has many equal ones."""


@cache
def yaml_loader() -> Any:
    """Return OmegaConf's class that reads YAML, with libyaml's parser: same rules of numbers and of double keys.

    A PyYAML that was built without libyaml has only the parser in Python, which takes ten times as long. It also reads
    what libyaml refuses, because its errors quote the line.
    """
    plain = plain_loader()
    if not yaml.__with_libyaml__:
        return plain

    parser: Any = yaml.cyaml.CParser  # pyright: ignore[reportAttributeAccessIssue]

    class Loader(parser, plain):
        def __init__(self, stream: Any) -> None:
            self.text = stream
            parser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                if hasattr(self.text, "seek"):
                    self.text.seek(0)
                return plain(self.text).get_single_data()

    return Loader


@cache
def yaml_dumper() -> Any:
    """Return OmegaConf's class that writes YAML, with libyaml's emitter where PyYAML was built with it."""
    plain = plain_dumper()
    if not yaml.__with_libyaml__:
        return plain

    emitter: Any = yaml.cyaml.CDumper  # pyright: ignore[reportAttributeAccessIssue]

    class Dumper(emitter):
        pass

    Dumper.add_representer(str, plain.str_representer)
    return Dumper


def use_faster_parsers() -> None:
    """Let OmegaConf, and with it Hydra, read and write YAML by libyaml, and parse each ``${...}`` once, from now on."""
    _utils.get_yaml_loader = yaml_loader
    omegaconf.get_omega_conf_dumper = yaml_dumper
    base.parse = parsed_once

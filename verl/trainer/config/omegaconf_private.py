"""All uses of private interfaces of OmegaConf.

``tests/trainer/config/test_omegaconf_private.py`` fails on a version of OmegaConf that changed one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import yaml
from omegaconf import _utils, base, omegaconf

NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
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
        return _keeping_texts(plain)

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

    return _keeping_texts(Loader)


def _keeping_texts(loader: Any) -> Any:
    """Return a subclass that reads numbers of keys that take texts, such as a name 2026_11_28, as they are written."""

    class TextLoader(loader):
        is_text: Callable[[str], bool] = staticmethod(lambda key: False)
        """Whether a dotted key of a file takes texts."""

        def get_single_node(self) -> Any:
            self.keep_texts(root := super().get_single_node(), ())
            return root

        def keep_texts(self, node: Any, path: tuple[str, ...]) -> None:
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    self.keep_texts(value, (*path, str(key.value)))
            elif isinstance(node, yaml.SequenceNode):
                for value in node.value:
                    self.keep_texts(value, path)
            elif getattr(node, "tag", "") in NUMBERS and not re.fullmatch(r"0|[1-9]\d*", node.value):
                node.tag = "tag:yaml.org,2002:str" if self.is_text(".".join(path)) else node.tag

    return TextLoader


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


def use_faster_parsers(is_text: Callable[[str], bool] = lambda key: False) -> None:
    """Let OmegaConf, and with it Hydra, read and write YAML by libyaml, and parse each ``${...}`` once, from now on.

    An unquoted number at a dotted key that ``is_text`` stays as it is written.
    """
    yaml_loader().is_text = staticmethod(is_text)
    _utils.get_yaml_loader = yaml_loader
    omegaconf.get_omega_conf_dumper = yaml_dumper
    base.parse = parsed_once

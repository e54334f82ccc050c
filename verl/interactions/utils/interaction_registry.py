"""Interactions of a configuration."""

from __future__ import annotations

from verl.base.import_utils import user_code
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.utils.class_entries import Entries, load_class, read_entries

KEYS = ("name", "class_name", "config")
SETTING = "interaction_config_path"


def get_interaction_class(cls_name: str) -> type[BaseInteraction]:
    """Return the class ``package.module.Class`` or ``file.py:Class``.

    Raises:
        ConfigError: there is no such class, or it is no interaction.
    """
    return load_class(cls_name, BaseInteraction, "get_interaction_class")


def initialize_interactions_from_config(interaction_config_file: Entries) -> dict[str, BaseInteraction]:
    """Make the interactions of a YAML file with a list ``interaction``, or of such a list.

    Each entry has ``name``, which rows give in ``interaction_kwargs.name``,
    ``class_name`` (``package.module.Class`` or ``file.py:Class``) and ``config`` (what the class reads). Without
    ``name`` it is the class's, in small letters and without a last ``Interaction``.

    Returns:
        the interactions by name.

    Raises:
        ConfigError: the file, an entry or a class is wrong, or two have one name.
    """
    interactions: dict[str, BaseInteraction] = {}
    for where, entry in read_entries(interaction_config_file, SETTING, "interaction", KEYS):
        cls = load_class(entry.get("class_name"), BaseInteraction, f"{where}.class_name")
        name = str(entry.get("name") or cls.__name__.removesuffix("Interaction").lower())
        if name in interactions:
            raise ConfigError(f"{where}: another interaction is called '{name}' too. Give them different names.")
        try:
            with user_code(f"{cls.__name__} cannot be made"):
                interactions[name] = cls({**(entry.get("config") or {}), "name": name})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return interactions

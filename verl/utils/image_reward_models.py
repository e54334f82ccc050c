"""Reward and value models of the families with images, for which Transformers has no classes.

::

    model = sequence_classifier("qwen2_5_vl").from_pretrained(folder)
    score = model(**processor(text=[text], images=[image], return_tensors="pt")).logits       # (1, 1)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from verl.utils.transformers_private import GenericForSequenceClassification, GenericForTokenClassification


@cache
def sequence_classifier(model_type: str) -> type[PreTrainedModel]:
    """Return the ``...ForSequenceClassification`` of a family, and make Transformers' Auto class find it.

    It is as those of text models in Transformers: a backbone, and a linear head ``score`` without bias, read at the
    last token that is not padding.

    Args:
        model_type: of the config; a key of :data:`verl.vision.families.FAMILIES`.
    """
    return _model_class(model_type, GenericForSequenceClassification, AutoModelForSequenceClassification)


@cache
def token_classifier(model_type: str) -> type[PreTrainedModel]:
    """Return the ``...ForTokenClassification`` of a family, and make Transformers' Auto class find it.

    Its linear head ``score`` has a bias and is read at each token; a critic is one with one label. Arguments as of
    :func:`sequence_classifier`.
    """
    return _model_class(model_type, GenericForTokenClassification, AutoModelForTokenClassification)


def _model_class(model_type: str, generic: type, auto: Any) -> type[PreTrainedModel]:
    family = transformers.CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
    base = getattr(transformers, f"{family}PreTrainedModel")
    name = f"{family}{generic.__name__.removeprefix('Generic')}"
    model_class = type(name, (generic, base), {"__module__": __name__})
    # Without exist_ok a class for a config of Transformers' own is not registered.
    auto.register(base.config_class, model_class, exist_ok=True)
    return model_class

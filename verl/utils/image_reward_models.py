"""Reward models of the families with images, for which Transformers has no classes.

::

    model = sequence_classifier("qwen2_5_vl").from_pretrained(folder)
    score = model(**processor(text=[text], images=[image], return_tensors="pt")).logits       # (1, 1)
"""

from __future__ import annotations

from functools import cache

import transformers
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from verl.utils.transformers_private import GenericForSequenceClassification
from verl.vision.families import FAMILIES


@cache
def sequence_classifier(model_type: str) -> type[PreTrainedModel]:
    """Return the ``...ForSequenceClassification`` of a family, and make Transformers' Auto class find it.

    It is as those of text models in Transformers: a backbone, and a linear head ``score`` without bias, read at the
    last token that is not padding.

    Args:
        model_type: of the config; a key of :data:`verl.vision.families.FAMILIES`.
    """
    family = FAMILIES[model_type].removesuffix("Processor")
    base = getattr(transformers, f"{family}PreTrainedModel")
    name, bases = f"{family}ForSequenceClassification", (GenericForSequenceClassification, base)
    found = type(name, bases, {"__module__": __name__})
    # Without exist_ok a class for a config of Transformers' own is not registered.
    AutoModelForSequenceClassification.register(base.config_class, found, exist_ok=True)
    return found

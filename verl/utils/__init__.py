"""Small shared tools; re-exports the tokenizer loaders and two functions on groups, which users import from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use

__all__ = ["as_torch_index", "group_mean_std", "hf_processor", "hf_tokenizer"]

if TYPE_CHECKING:
    from verl.utils.tokenizer import hf_processor, hf_tokenizer


# transformers takes seconds to import, and most of verl.utils does not need it; verl.algorithms stands above.
__getattr__ = on_first_use(
    __name__,
    {
        "as_torch_index": "verl.algorithms.groups",
        "group_mean_std": "verl.algorithms.groups",
        "hf_processor": "verl.utils.tokenizer",
        "hf_tokenizer": "verl.utils.tokenizer",
    },
)

"""Small tools without state; the tokenizer loaders are here under the names that users know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["hf_processor", "hf_tokenizer"]

if TYPE_CHECKING:
    from verl.utils.tokenizer import hf_processor, hf_tokenizer


def __getattr__(name: str) -> Any:
    # Lazy: transformers takes seconds to import, and most of verl.utils does not need it.
    if name in __all__:
        from verl.utils import tokenizer

        return getattr(tokenizer, name)
    raise AttributeError(f"module 'verl.utils' has no attribute '{name}'")

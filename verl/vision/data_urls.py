"""Pictures that others send as base64: programs, servers of tools. They are checked before anything decodes them."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from typing import Any

from PIL import Image, UnidentifiedImageError

from verl.errors import DataError

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Formats that the vendors of models take. Further ones of Pillow start other programs, or are rarely tested."""
MOST_PIXELS = 64_000_000
"""Largest picture, 8000 x 8000: decoding takes up to 11 bytes for each pixel, however few the file has."""
_URL = re.compile(r"data:image/(?:png|jpe?g|gif|webp);base64,", re.IGNORECASE)
_EXPECTED = "Expected image/png, image/jpeg, image/gif or image/webp"


def data_url(media_type: Any, data: Any, place: str) -> str:
    """Return the ``data:`` URL of a picture.

    Args:
        media_type: ``image/png``, ``image/jpeg``, ``image/gif`` or ``image/webp``. Which of them the picture is, its
            bytes say.
        data: base64 of a file.
        place: for errors.

    Raises:
        DataError: it is no such picture, or a larger one than ``MOST_PIXELS``; the message names ``place``.
    """
    if not isinstance(media_type, str) or not _URL.fullmatch(f"data:{media_type};base64,"):
        raise DataError(f"{place}: the media type of an image is {media_type!r:.100}. {_EXPECTED}.")
    if not isinstance(data, str):
        raise DataError(f"{place}: the data of an image are {data!r:.100}. Expected a text in base64.")
    return require_data_url(f"data:{media_type};base64,{data}", place)


def require_data_url(url: Any, place: str) -> str:
    """Return a ``data:`` URL of a picture after a look at the head of its file; see :func:`data_url`."""
    begin = _URL.match(url) if isinstance(url, str) else None
    if begin is None:
        if isinstance(url, str) and url.startswith("data:"):
            raise DataError(
                f"{place}: an image has the URL {url!r:.60}. {_EXPECTED}, in base64: data:image/png;base64,..."
            )
        raise DataError(
            f"{place}: an image has the URL {url!r:.100}. Expected data:image/png;base64,...: no address and no file "
            "is opened for it."
        )
    try:
        content = base64.b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place}: the base64 text of an image is damaged: {error}.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is a smaller one
            width, height = Image.open(io.BytesIO(content), formats=FORMATS).size
    except UnidentifiedImageError as error:
        raise DataError(
            f"{place}: the {len(content)} bytes of an image are no file that can be read. {_EXPECTED}."
        ) from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{place}: {_too_large(str(error))}") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"{place}: an image cannot be read: {error or type(error).__name__}.") from error
    if width * height > MOST_PIXELS:
        raise DataError(f"{place}: {_too_large(f'it has {width} x {height} pixels')}")
    return url


def _too_large(found: str) -> str:
    return f"an image is too large ({found}); {MOST_PIXELS} pixels are the most. Send a smaller one."

"""URLs with a picture in base64, as programs and tool servers send pictures."""

from __future__ import annotations

import base64
import io
import re

from PIL import Image

from verl.errors import DataError

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Formats that the vendors of models take. Of Pillow's others some start further programs."""
MAX_IMAGE_PIXELS = 64_000_000
"""Largest picture, 8000 x 8000: decoding takes up to 11 bytes for each pixel, however few the file has."""
_BEGIN = re.compile(r"data:image/(?:png|jpe?g|gif|webp);base64,", re.IGNORECASE)
_EXPECTED = "Expected image/png, image/jpeg, image/gif or image/webp"


def data_url(media_type: object, data: object, where: str) -> str:
    """Return the ``data:`` URL of a picture.

    Args:
        media_type: ``image/png``, ``image/jpeg``, ``image/gif`` or ``image/webp``.
        data: base64 of a file.
        where: for errors.

    Raises:
        DataError: the type is another, or the data are no text; the message names ``where``.
    """
    if not isinstance(media_type, str) or not _BEGIN.fullmatch(f"data:{media_type};base64,"):
        raise DataError(f"{where}: the media type of an image is {media_type!r:.100}. {_EXPECTED}.")
    if not isinstance(data, str):
        raise DataError(f"{where}: the data of an image are {data!r:.100}. Expected a text in base64.")
    return f"data:{media_type};base64,{data}"


def url_of(image: Image.Image) -> str:
    """Return the ``data:`` URL of an image, as PNG."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def base64_of(url: str, where: str) -> str:
    """Return the base64 text of a ``data:`` URL.

    Raises:
        DataError: it is another address, or no picture; the message names ``where``.
    """
    begin = _BEGIN.match(url)
    if begin is not None:
        return url[begin.end() :]
    if url.startswith("data:"):
        raise DataError(f"{where}: an image has the URL {url!r:.60}. {_EXPECTED}, as data:image/png;base64,...")
    raise DataError(
        f"{where}: an image has the URL {url!r:.100}. Expected data:image/png;base64,...: no address and no file is "
        "opened for it."
    )

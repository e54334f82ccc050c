"""Images of a row, from :mod:`verl.vision.images`."""

from verl.base.doors import absent_names
from verl.vision.images import process_image as process_image

__getattr__ = absent_names(__name__)

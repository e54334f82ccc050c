"""Images of a row, from :mod:`verl.vision.images`."""

from verl.compat.import_hooks import old_names
from verl.vision.images import process_image as process_image

__getattr__ = old_names(__name__)

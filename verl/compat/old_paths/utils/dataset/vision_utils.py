"""Images of a row, from :mod:`verl.vision.images`."""

from verl.vision.images import process_image as process_image

"""Number formats by name, from :mod:`verl.toolkit.names`."""

from verl.toolkit.names import PrecisionType as PrecisionType

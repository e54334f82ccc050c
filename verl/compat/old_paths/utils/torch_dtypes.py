"""Number formats by name, from :mod:`verl.compat.toolkit.names`."""

from verl.compat.toolkit.names import PrecisionType as PrecisionType

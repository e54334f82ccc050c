from verl.compat.toolkit.names import PrecisionType as PrecisionType

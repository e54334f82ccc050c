from verl.toolkit.names import PrecisionType as PrecisionType

from verl.compat.toolkit.names import DatasetPadMode as DatasetPadMode
from verl.compat.toolkit.tensor_collator import SFTTensorCollator as SFTTensorCollator

from verl.toolkit.names import DatasetPadMode as DatasetPadMode
from verl.toolkit.tensor_collator import SFTTensorCollator as SFTTensorCollator

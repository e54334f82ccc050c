from verl.api.result import TrainingResult as TrainingResult
from verl.api.sampling import evaluate as evaluate
from verl.api.sampling import generate as generate
from verl.api.training import sft as sft
from verl.api.training import train as train
from verl.protocol import DataProto as DataProto

__version__: str

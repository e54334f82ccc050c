"""The binary messages of the protocol: training data of a client, results of training and sampling.

They are protocol buffers. The table below has the fields of each message that the service reads or writes; unknown
ones are skipped. Arrays are bytes in the byte order of x86.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from verl.plugins.serve.refusals import RefusedError

MEDIA_TYPE = "application/x-protobuf"
_FIELDS = """
Tensor                 1 dense bytes, 2 sparse SparseRows, 3 dtype int32, 4 shape int64*
SparseRows             1 values bytes, 2 row_bounds bytes, 3 columns bytes
BatchedTensor          1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
Number                 1 key string, 2 value double
NamedBatchedTensor     1 key string, 2 value BatchedTensor
ArrayRecord            1 type_tag string, 2 fields NamedBatchedTensor*, 3 num_datums int64
ForwardBackwardOutput  1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics Number*
Setting                1 number double, 2 text string
NamedSetting           1 key string, 2 value Setting
Tokens                 1 tokens bytes
Chunk                  1 text Tokens, 2 image Tokens, 3 sound Tokens
NamedTensor            1 key string, 2 value Tensor
Datum                  1 model_input Chunk*, 2 loss_fn_inputs NamedTensor*
ForwardBackwardRequest 1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 6 forward_only bool, \
7 loss_fn_config NamedSetting*
SampledSequence        1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes
SampleResponse         1 sequences SampledSequence*, 2 prompt_logprobs bytes
"""
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOP_REASONS = {"stop": 0, "length": 1}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="verl/serve.proto", package="verl.serve", syntax="proto2")
    scalars = ("bytes", "int32", "int64", "string", "double", "bool")
    kinds = {name: descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}") for name in scalars}
    for line in _FIELDS.strip().splitlines():
        name, fields = line.split(maxsplit=1)
        message = file.message_type.add(name=name)
        for tag, field, kind, many in re.findall(r"(\d+) (\w+) (\w+)(\*?)", fields):
            added = message.field.add(name=field, number=int(tag), label=3 if many else 1)
            if kind in kinds:
                added.type = kinds[kind]
            else:
                added.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                added.type_name = f".verl.serve.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"verl.serve.{n}")) for n in names}


_MESSAGES = _message_classes()


@dataclass(frozen=True)
class Datum:
    """A training sequence: the model reads ``tokens``, and each of them predicts a target."""

    tokens: list[int]
    inputs: Mapping[str, np.ndarray]
    """``target_tokens`` and what the loss reads."""


@dataclass(frozen=True)
class TrainingData:
    """Body of a request for a pass with or without gradients."""

    model_id: str
    seq_id: int
    messages: list[Message]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool

    def data(self) -> list[Datum]:
        """Read the sequences.

        Raises:
            RefusedError: one has images or sounds, or a tensor of another form; the message names it.
        """
        return [_datum(message, f"datum {index}") for index, message in enumerate(self.messages)]


def read_training_data(body: bytes) -> TrainingData:
    """Read a request.

    Raises:
        RefusedError: it is no such message.
    """
    message = _MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RefusedError(f"the body is no ForwardBackwardRequest: {error}.") from error
    settings = {s.key: s.value.text if s.value.HasField("text") else s.value.number for s in message.loss_fn_config}
    return TrainingData(
        message.model_id, message.seq_id, [*message.data], message.loss_fn, settings, message.forward_only
    )


def _datum(message: Any, where: str) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("text"):
            raise RefusedError(f"{where} has an image or a sound; this service trains on text alone.")
        tokens += _array(chunk.text.tokens, np.dtype("<i4"), where).tolist()
    return Datum(tokens, {named.key: _tensor(named.value, f"{where}: {named.key}") for named in message.loss_fn_inputs})


def _tensor(message: Any, where: str) -> np.ndarray:
    if message.HasField("sparse"):
        raise RefusedError(f"{where} has several values for each token (a sparse matrix); give one for each.")
    if message.dtype not in _DTYPES:
        raise RefusedError(f"{where} has dtype {message.dtype}; use float32 (1) or int64 (2).")
    values = _array(message.dense, _DTYPES[message.dtype], where)
    shape = tuple(message.shape) or values.shape
    if len(shape) != 1 or shape[0] != len(values):
        raise RefusedError(f"{where} has shape {list(shape)}; give one value for each token, in one dimension.")
    return values


def _array(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RefusedError(f"{where} has {len(data)} bytes, which are no whole numbers of {dtype.itemsize} bytes.")
    return np.frombuffer(data, dtype=dtype).copy()  # that of the body cannot be written to, which PyTorch warns of


def write_training_result(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Write the log-prob of each target of each datum, and metrics, whose names end in how parts are joined."""
    message = _MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="TensorRecord")
    record = message.loss_fn_outputs.add(type_tag="TensorRecord", num_datums=len(log_probs))
    field = record.fields.add(key="logprobs")
    arrays = [np.asarray(array, dtype="<f4") for array in log_probs]
    field.value.data = b"".join(array.tobytes() for array in arrays)
    field.value.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
    field.value.dtype = _FLOAT32
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return message.SerializeToString()


@dataclass(frozen=True)
class Sampled:
    """A response to a prompt."""

    tokens: list[int]
    log_probs: list[float]
    stop_reason: str
    """``stop`` or ``length``."""


def write_samples(samples: Sequence[Sampled], prompt_log_probs: Sequence[float] | None) -> bytes:
    """Write responses, and the log-probs of the prompt's tokens, NaN where there is none."""
    message = _MESSAGES["SampleResponse"]()
    for sample in samples:
        message.sequences.add(
            stop_reason=_STOP_REASONS[sample.stop_reason],
            tokens=np.asarray(sample.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(sample.log_probs, dtype="<f4").tobytes(),
        )
    if prompt_log_probs is not None:
        message.prompt_logprobs = np.asarray(prompt_log_probs, dtype="<f4").tobytes()
    return message.SerializeToString()

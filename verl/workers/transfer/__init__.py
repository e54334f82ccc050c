"""Transfer of the policy's weights from the ranks that train it to ranks of other processes that only sample."""

from verl.workers.transfer.broadcast import Broadcast as Broadcast
from verl.workers.transfer.driver import WeightTransfer as WeightTransfer
from verl.workers.transfer.shared_memory import SharedMemory as SharedMemory
from verl.workers.transfer.transport import Participant as Participant
from verl.workers.transfer.transport import Sent as Sent
from verl.workers.transfer.transport import WeightTransport as WeightTransport
from verl.workers.transfer.transport import register_transfer as register_transfer

"""Public address of :mod:`verl.sandbox`."""

from verl.sandbox import Limits as Limits
from verl.sandbox import Sandbox as Sandbox
from verl.sandbox import SandboxError as SandboxError
from verl.sandbox import SandboxUnavailableError as SandboxUnavailableError
from verl.sandbox import Status as Status
from verl.sandbox import why_unavailable as why_unavailable

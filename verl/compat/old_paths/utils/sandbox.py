"""Public address of :mod:`verl.plugins.sandbox`."""

from verl.plugins.sandbox import Limits as Limits
from verl.plugins.sandbox import Sandbox as Sandbox
from verl.plugins.sandbox import SandboxError as SandboxError
from verl.plugins.sandbox import SandboxUnavailableError as SandboxUnavailableError
from verl.plugins.sandbox import Status as Status
from verl.plugins.sandbox import why_unavailable as why_unavailable

from verl.compat.toolkit.processes import get_free_port as get_free_port
from verl.compat.toolkit.processes import is_ipv4 as is_ipv4
from verl.compat.toolkit.processes import is_ipv6 as is_ipv6
from verl.compat.toolkit.processes import is_ipv6 as is_valid_ipv6_address
__all__ = ['get_free_port', 'is_ipv4', 'is_ipv6', 'is_valid_ipv6_address']

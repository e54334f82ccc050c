from verl.compat.toolkit.config import omega_conf_to_dataclass as omega_conf_to_dataclass
from verl.compat.toolkit.config import update_dict_with_config as update_dict_with_config
from verl.compat.toolkit.config import validate_config as validate_config

from verl.compat.toolkit.files import copy as copy
from verl.compat.toolkit.files import exists as exists
from verl.compat.toolkit.files import makedirs as makedirs

"""Local copies of remote files, from :mod:`verl.base.fs` and :mod:`verl.compat.toolkit.files`."""

from verl.base.fs import copy_to_local as copy_to_local
from verl.compat.toolkit.files import copy_local_path_from_hdfs as copy_local_path_from_hdfs
from verl.compat.toolkit.files import copy_to_shm as copy_to_shm
from verl.compat.toolkit.files import get_local_temp_path as get_local_temp_path
from verl.compat.toolkit.files import is_non_local as is_non_local
from verl.compat.toolkit.files import local_mkdir_safe as local_mkdir_safe
from verl.compat.toolkit.files import md5_encode as md5_encode
from verl.compat.toolkit.files import verify_copy as verify_copy

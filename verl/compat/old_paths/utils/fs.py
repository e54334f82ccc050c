"""Local copies of remote files, from :mod:`verl.base.fs` and :mod:`verl.toolkit.files`."""

from verl.base.doors import old_names
from verl.base.fs import copy_to_local as copy_to_local
from verl.toolkit.files import copy_local_path_from_hdfs as copy_local_path_from_hdfs
from verl.toolkit.files import copy_to_shm as copy_to_shm
from verl.toolkit.files import get_local_temp_path as get_local_temp_path
from verl.toolkit.files import is_non_local as is_non_local
from verl.toolkit.files import local_mkdir_safe as local_mkdir_safe
from verl.toolkit.files import md5_encode as md5_encode
from verl.toolkit.files import verify_copy as verify_copy

__getattr__ = old_names(__name__)

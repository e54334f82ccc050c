from verl.base.fs import copy_to_local as copy_to_local
from verl.toolkit.files import copy_local_path_from_hdfs as copy_local_path_from_hdfs
from verl.toolkit.files import local_mkdir_safe as local_mkdir_safe

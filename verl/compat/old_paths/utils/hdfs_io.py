"""Folders and copies of files on any file system, from :mod:`verl.toolkit.files`."""

from verl.toolkit.files import copy as copy
from verl.toolkit.files import exists as exists
from verl.toolkit.files import makedirs as makedirs

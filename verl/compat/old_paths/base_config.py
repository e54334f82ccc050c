"""Public address of ``verl.config.base``."""

from verl.config.base import BaseConfig as BaseConfig
from verl.config.base import OneOrMany as OneOrMany
from verl.config.base import config_fields as config_fields
from verl.config.base import meta_of as meta_of
from verl.config.base import section as section
from verl.config.base import sentence_of as sentence_of
from verl.config.base import setting as setting
from verl.config.base import subsection as subsection

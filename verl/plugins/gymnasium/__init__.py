"""Environments of gymnasium; needs the extra ``gymnasium``."""

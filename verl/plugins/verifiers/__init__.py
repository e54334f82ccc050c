"""Environments of verifiers; needs the extra ``verifiers``."""

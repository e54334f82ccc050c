"""Names that public programs import and runs of verl do not need; no module outside of this package imports it.

- ``import_hooks``: importers that add these paths and names to a process; ``verl/__init__.py`` installs it.
- ``old_paths``: import paths of other versions, files of re-exports.
- ``reexports``: names that modules of other versions show besides their own.
- ``absent_names``: names that are not here on purpose, and what to use instead.
- ``own_fit``: ``RayPPOTrainer``, with the parts of which a subclass writes its own ``fit``.
- ``toolkit``: tools for trainers, workers and scripts that users write around verl.
"""

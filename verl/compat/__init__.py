"""What public programs expect of verl and runs of verl do not need; no module outside of this package imports it.

``old_paths`` mirrors import paths, ``own_fit`` is ``RayPPOTrainer`` with the parts of a ``fit`` that a user writes.
"""

"""The trainer under its public name, with the parts of which a subclass writes its own ``fit``."""

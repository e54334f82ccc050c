"""Public address of the losses of distillation."""

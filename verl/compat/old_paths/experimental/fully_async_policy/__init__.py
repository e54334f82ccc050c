"""Public path of the command that samples on other ranks, beside training."""

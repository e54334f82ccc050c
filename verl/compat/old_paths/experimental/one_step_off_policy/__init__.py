"""Public path of the command that samples on other ranks, one step ahead of training."""

"""Tools for the trainers, workers and scripts that users write around verl, which itself calls none of them."""

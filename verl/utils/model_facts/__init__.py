"""Read facts of a model from its files alone: config entries, experts, layouts of Megatron, damaged files."""

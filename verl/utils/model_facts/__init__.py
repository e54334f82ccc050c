"""What is known of a model from its files alone: entries of its config, experts, layouts of Megatron, damaged files."""

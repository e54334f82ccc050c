"""Tools that a model may call during its rollout, and how they are described in a configuration."""

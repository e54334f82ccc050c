"""A service of the Tinker kind: clients train LoRA adapters over one base model, and sample from them, by HTTP."""

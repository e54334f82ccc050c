"""The model of a Hugging Face folder with its head, which all training engines compute: inputs, outputs, adapters."""

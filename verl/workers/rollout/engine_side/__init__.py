"""Modules that run in the processes of vLLM and SGLang, which have this folder on their module path.

The environment of those processes need not have verl installed. Import only PyTorch, safetensors, the engine itself and
the standard library here, and modules of this folder by their bare names.
"""

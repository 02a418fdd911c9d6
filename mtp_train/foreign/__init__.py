"""Draft heads that others wrote: recognised, checked by name and shape, and read into our kinds.

Everything here reads ``config.json`` and safetensors, never a pickle.
"""

"""Typed Flyte tasks, one per file: fetch the inputs, call the library, hand over the outputs.

Heavy imports stay inside the bodies, so that registering needs no GPU stack.
"""

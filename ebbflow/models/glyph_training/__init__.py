"""Trains the glyph model from scratch (``train``) on strings drawn as pixels (``lettering``)."""

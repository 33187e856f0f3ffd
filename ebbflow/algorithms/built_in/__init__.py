"""The algorithms that Ebbflow ships. A file holds the hyper-parameters and the loss of one, or of
variants with the same loss.
"""

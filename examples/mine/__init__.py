"""What a user of Ebbflow wrote: an algorithm, a reward and a model family; docs/extending.md
explains them.
"""

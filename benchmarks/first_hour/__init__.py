"""What a GPU shows within the first half hour: ``python -m benchmarks.first_hour``.

Each part (``parts/``) is a process of its own with a time limit, so that a part that crashes or
hangs ends alone. It answers its claims with a verdict and a number, in a file of lines that the
next start of the same folder keeps. ``page.py`` writes all of them as one page.
"""

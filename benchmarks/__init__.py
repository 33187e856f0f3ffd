"""What is measured. Each module runs as ``python -m benchmarks.<name>`` and writes to
``benchmarks/results``.
"""

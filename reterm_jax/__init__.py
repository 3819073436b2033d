"""Train terminal agents in JAX to recover from their own failures (ReTerm, arXiv 2610.18484).

Importing the package imports nothing heavy: each subpackage is imported where it is used.
"""

__version__ = "0.1.0"

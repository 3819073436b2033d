"""Families of small verifiable terminal tasks, made to order as Harbor task directories.

`generate` writes tasks to disk; `naive`, `expert`, `failure`, `first_attempt` and `next_attempt` are agents
that act on them by script.
"""

from reterm_jax.tasks.families.base import NONE, SUBMIT, Action, Blueprint, Family
from reterm_jax.tasks.families.generate import FAMILIES, generate
from reterm_jax.tasks.families.script import blueprint, expert, failure, first_attempt, naive, next_attempt

__all__ = [
    "FAMILIES",
    "NONE",
    "SUBMIT",
    "Action",
    "Blueprint",
    "Family",
    "blueprint",
    "expert",
    "failure",
    "first_attempt",
    "generate",
    "naive",
    "next_attempt",
]

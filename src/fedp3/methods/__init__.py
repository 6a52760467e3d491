"""The neighbours in the same frame: every method a row of settings, some with hooks.

`METHODS` says what a method's name sets in a config; `hooks` makes the closed record of hooks from the names and
numbers of its [hooks] section.
"""

from fedp3.methods.parts import EXCHANGES, LOSSES, PASSES, Around, Parts, clashes, hooks, under_ldp
from fedp3.methods.table import METHODS, Method

__all__ = ["EXCHANGES", "LOSSES", "METHODS", "PASSES", "Around", "Method", "Parts", "clashes", "hooks", "under_ldp"]

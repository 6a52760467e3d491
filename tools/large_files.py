"""Refuse files over 1 MB: a repository keeps them for ever."""

import sys
from pathlib import Path

LIMIT = 1_000_000
large = [path for path in map(Path, sys.argv[1:]) if path.is_file() and path.stat().st_size > LIMIT]
for path in large:
    print(f"{path} has {path.stat().st_size / 1e6:.1f} MB; 1 MB is the limit")
sys.exit(bool(large))

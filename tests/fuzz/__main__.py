"""``python -m tests.fuzz``: see compare.py."""

import typer

from .compare import main

if __name__ == "__main__":
    typer.run(main)

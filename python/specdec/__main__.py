"""``python -m specdec`` is the command ``specdec``, also where its script is not on the PATH."""

from .cli import main

main()

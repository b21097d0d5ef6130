"""``python -m specdec`` is the command ``specdec``, also where its script is not on the PATH."""

from .cli import app

app(prog_name="specdec")

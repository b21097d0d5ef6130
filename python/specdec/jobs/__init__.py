"""Jobs: a file of prompts in, a file of results out, for more prompts than memory holds and longer than a machine runs.

``lines`` reads and checks the input, ``results`` keeps the output so that a job that was killed goes on where it was,
``settings`` says when it may, ``run`` puts a scheduler between the two, ``progress`` shows how far it is. docs/jobs.md
is for who runs one."""

"""Jobs: a file of prompts in, a file of results out, for more prompts than memory holds and longer than a machine runs.

``lines`` and ``input`` read and check the input, ``output`` keeps the results, ``manifest`` keeps the settings and
decides whether a killed job may resume, ``run`` puts a scheduler between input and output, ``signals`` ends it between
two results. docs/jobs.md is for those who run one."""

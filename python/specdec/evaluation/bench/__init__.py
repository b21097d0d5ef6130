"""``specdec bench``: how fast every way to decode is on these models and this machine, why, and which one is fastest.

``grid`` says what is measured, ``methods`` makes it run, ``session`` measures it in turns, ``measure`` makes the
numbers of one round of a cell, ``folder`` keeps the rounds, so that a stopped run can resume, ``results`` and
``verdicts`` make numbers and words of all rounds, and ``tables`` writes them for spreadsheets. docs/bench.md is for
users."""

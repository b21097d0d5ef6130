"""``specdec bench``: how fast every way to decode is on these models and this machine, why, and which one is fastest.

``grid`` says what is measured, ``methods`` makes it run, ``session`` measures it in turns, ``measure`` says what one
round of a cell came to, ``folder`` keeps the rounds so that a run that was stopped goes on, ``results`` and
``verdicts`` say what they come to, and ``tables`` writes it for spreadsheets. docs/bench.md is for users."""

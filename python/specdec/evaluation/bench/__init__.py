"""``specdec bench``: how fast every way to decode is on these models and this machine, why, and which one is fastest.

``grid`` says what is measured, ``methods`` makes it run, ``session`` measures it in turns, ``measure`` makes the
numbers of one round of a cell, ``folder`` keeps the rounds, so that a stopped run can resume, ``results`` and
``verdicts`` make numbers and words of all rounds, and ``tables`` writes them for spreadsheets.

Of a suite, ``suites`` says how each counts, ``talks`` asks a method all turns of a question, ``suite_session`` measures
that in turns, ``answers`` is the format of Spec-Bench's files, and ``suite_table`` counts what is in them.
docs/bench.md is for users."""

"""Random steps: ``python -m tests.fuzz`` compares backends with the reference, ``python -m tests.fuzz.sanitize`` gives
compute-sanitizer something to watch."""

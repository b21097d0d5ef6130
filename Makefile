# The commands that people type. The tools of .venv come first, where it is.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
.PHONY: test test-all lint docs bench

test:  # every day: minutes on two cores
	python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test-all: test  # and what is marked nightly: hours; the same command goes on where it was
	python -m tests.nightly -j 2

lint:  # what CI and the hook of pre-commit check
	ruff check
	ruff format --check
	git ls-files '*.h' '*.c' '*.cpp' '*.cu' | xargs clang-format --dry-run --Werror
	mypy

docs:  # the pages and the API reference, as a site in build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

bench:  # the six results of docs/numbers.md
	python bench/headline.py

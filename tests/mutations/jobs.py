"""Of jobs over files: what a resumed job takes for done, and what it would do twice or lose."""

from .mutation import Mutation, mutations

OUTPUT = "tests/jobs/test_job_output.py"
INPUT = "tests/jobs/test_job_input.py"
JOBS = "tests/jobs/test_jobs.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/jobs/output.py",
        OUTPUT,
        {
            "job-leaves-half-a-line-when-resumed": (
                "            self.settings = settings\n        self._lines.cut()\n",
                "            self.settings = settings\n",
            ),
            "job-does-again-what-is-done": ('            self.done.add(row["id"])\n', ""),
            "job-keeps-results-of-another-input": ("if self.done <= ids:", "if not self.done or self.done & ids:"),
            "job-mixes-results-of-other-settings": ("            if other:\n", "            if False:\n"),
            "job-counts-only-its-own-results": (
                "            self.totals.add(row)\n        if self._lines.size",
                "        if self._lines.size",
            ),
        },
    ),
    *mutations(
        "python/specdec/line_file.py",
        OUTPUT,
        {
            "job-takes-half-a-line-for-a-result": ('if line.endswith(b"\\n"):', "if line:"),
            "job-writes-over-the-last-line-when-resumed": (
                "            self.end += len(line)\n            yield",
                "            self.end += len(line) - 1\n            yield",
            ),
            "job-leaves-half-a-line-on-a-full-disk": ("                self.cut()\n", "                pass\n"),
            "job-shares-its-file": ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
            "job-removes-a-file-that-it-did-not-make": ("return self._made and self.end == 0", "return self.end == 0"),
        },
    ),
    *mutations(
        "python/specdec/jobs/input.py",
        INPUT,
        {
            "job-goes-on-without-lines-that-were-there": (
                "if earlier is not None and count < earlier.prompts:",
                "if earlier is not None and count < 0:",
            ),
            "job-does-not-compare-earlier-lines": (
                "if earlier is not None and count == earlier.prompts and",
                "if earlier is not None and count == 0 and",
            ),
            "job-runs-lines-that-nobody-checked": (
                "            if count == self.mark.prompts:\n                break\n",
                "",
            ),
            "job-does-not-see-that-its-input-changed": ("if digest.hexdigest() != self.mark.digest:", "if False:"),
            "job-checks-other-ids-than-it-runs": (
                "line = self._read(number, count - 1, text)",
                "line = self._read(number, count, text)",
                f"{INPUT} {OUTPUT}",
            ),
        },
    ),
    *mutations(
        "python/specdec/jobs/lines.py",
        INPUT,
        {
            "job-gives-every-line-one-seed": (
                "defaults.seed + index * texts",
                "defaults.seed",
                f"{INPUT} {JOBS}",
            ),
            "job-takes-the-last-of-two-keys": ("    if len(whole) < len(pairs):\n", "    if False:\n"),
        },
    ),
    *mutations(
        "python/specdec/jobs/manifest.py",
        f"{OUTPUT} -k 'settings or fingerprint'",
        {
            "job-does-not-see-other-weights": (
                '_samples(file) if file.suffix == ".safetensors" else [file.read_bytes()]',
                '[] if file.suffix == ".safetensors" else [file.read_bytes()]',
            ),
        },
    ),
    *mutations(
        "python/specdec/checks.py",
        f"{OUTPUT} -k settings",
        {
            "job-does-not-see-settings-that-are-new": (
                "dict.fromkeys((*then, *now))",
                "dict.fromkeys(then)",
                f"{OUTPUT}::test_settings_that_one_of_two_lacks_differ",
            ),
        },
    ),
    *mutations(
        "python/specdec/files.py",
        f"{OUTPUT} -k settings",
        {
            "job-leaves-half-of-its-settings": ("        part.unlink(missing_ok=True)\n        raise", "        raise"),
        },
    ),
    *mutations(
        "python/specdec/jobs/run.py",
        JOBS,
        {
            "job-stops-within-a-line": (
                "        with signals.held():\n            results.append(row)\n",
                "        results.append(row)\n",
            ),
            "job-forgets-why-its-drafter-failed": (
                "drafter_error = drafter_error or outcome.drafter_error",
                "drafter_error = outcome.drafter_error",
            ),
            "job-ends-before-its-lines-are-on-the-disk": (
                "    results.sync()\n",
                "",
                f"{OUTPUT}::test_all_lines_are_on_the_disk_when_a_job_ends",
            ),
        },
    ),
    *mutations(
        "python/specdec/jobs/signals.py",
        JOBS,
        {
            "job-forgets-a-signal-that-waited": (
                "        if self._taken is not None:\n            raise Stopped(self._taken)\n",
                "",
            ),
            "job-leaves-its-handlers-behind": ("            signal.signal(number, handler)\n", "            pass\n"),
        },
    ),
    *mutations(
        "python/specdec/cli/models.py",
        "tests/cli/test_cli.py::test_as_a_process",
        {"cli-collects-what-it-has-loaded": ("gc.freeze()", "pass")},
    ),
    *mutations(
        "python/specdec/jobs/progress.py",
        f"{JOBS}::test_progress_of_a_job",
        {
            "job-claims-the-tokens-of-earlier-runs": (
                "self._began, self._clock, self._emitted = clock(), clock, totals.emitted",
                "self._began, self._clock, self._emitted = clock(), clock, 0",
            ),
        },
    ),
    *mutations(
        "python/specdec/jobs/result_line.py",
        "tests/jobs/test_jobs.py tests/cli/test_cli_batch.py",
        {
            "job-shows-text-after-a-stop": ("cut_after(text, line.settings.stop, line.prompt)", "text"),
            "job-hides-why-a-line-failed": ('row["error"] = error or f"', 'row["error"] = f"'),
            "job-numbers-a-prompt-by-its-id": ('"prompt": line.index,', '"prompt": line.id,'),
        },
    ),
]

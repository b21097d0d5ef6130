"""Of texts: where stop strings end them, and what is shown while tokens arrive."""

from .mutation import Mutation, mutations

STOPPING = "tests/test_stopping.py"
DETOKENIZE = "tests/test_detokenize.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/stopping.py",
        STOPPING,
        {
            "stop-is-found-where-it-comes-last": ("for kept in range(1, new + 1):", "for kept in range(new, 0, -1):"),
            "stop-looks-back-a-token-too-little": (
                "text[max(end - self._reach, 0) : end]",
                "text[max(end - self._reach + 1, 0) : end]",
            ),
            "stop-must-begin-in-the-last-token": ("max(before - len(target) + 1, 0)", "before"),
            "stop-is-found-where-it-ended-before": (
                "joined.find(target, max(before - len(target) + 1, 0))",
                "joined.find(target)",
            ),
            "stop-counts-characters-of-bytes": (
                "len(s) if self._read.in_characters else len(s.encode())",
                "len(s)",
            ),
            "stop-goes-across-ids-without-a-token": (
                "no string goes across it\n                break",
                "no string goes across it\n                continue",
            ),
            "stop-misreads-a-byte": ("*range(0xAE, 0x100)]", "*range(0xAD, 0x100)]"),
            "cut-after-the-last-of-several": ("min(ends, default=len(whole))", "max(ends, default=len(whole))"),
            "cut-misses-what-began-in-the-prompt": (
                "whole.find(string, max(len(prompt) - len(string) + 1, 0))",
                "whole.find(string, len(prompt))",
            ),
        },
    ),
    *mutations(
        "python/specdec/detokenize.py",
        DETOKENIZE,
        {
            "text-shows-bytes-of-an-open-run": (
                "if self._text == before or self._detokenizer.is_byte(token):",
                "if self._text == before:",
            ),
            "text-shows-half-a-character": ("self._new(self._text.rstrip(INCOMPLETE))", "self._new(self._text)"),
            "text-loses-half-a-character-at-the-end": ("return self._new(self._text)\n\n", 'return ""\n\n'),
            "text-window-never-moves": ("            self._move()\n", "            pass\n"),
            "text-window-begins-with-a-stripped-space": (
                "if text or len(self._window) > _LONG:\n",
                "if True:\n",
            ),
            "text-of-tokens-without-their-prompt": (
                "_decode(tokenizer, [*prompt, *tokens])[len(_decode(tokenizer, prompt)) :]",
                "_decode(tokenizer, tokens)",
                f"{DETOKENIZE} tests/jobs/test_jobs.py",
            ),
        },
    ),
]

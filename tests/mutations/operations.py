"""Mutations of what a server tells about itself, and of chats with servers."""

from __future__ import annotations

from .mutation import Mutation, mutations

SERVER = "tests/serving/server/"
CHAT = "tests/cli/test_remote_chat.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/serving/server/metrics.py",
        SERVER + "test_metrics.py",
        {
            "metrics-count-a-rejected-place": (
                "for position in range(step.produced_by.count(Producer.ACCEPTED)):",
                "for position in range(len(step.produced_by)):",
            ),
            "metrics-count-drafts-twice": ("stats.drafted - self._drafted)", "stats.drafted)"),
            "metrics-read-a-prompt-each-step": ("if self._tokens == 0:", "if True:"),
            "metrics-of-texts-closed-twice": ("if not self._over:", "if True:"),
            "metrics-with-the-times-of-series": ("encode(_WithoutTimes(self._registry))", "encode(self._registry)"),
            "metrics-of-lanes-mixed": ("str(len(self._of_lanes)), *key)", '"0", *key)'),
        },
    ),
    *mutations(
        "python/specdec/serving/server/operations.py",
        SERVER + "test_operations.py",
        {
            "health-with-a-dead-engine": (
                '    _check_engines(request.app.state.service)\n    return {"status": "ok"}',
                '    return {"status": "ok"}',
            ),
        },
    ),
    *mutations(
        "python/specdec/serving/server/predict.py",
        SERVER + "test_predict.py",
        {
            "predict-without-its-filters": ('"temperature": 1.0, "top_k": 10, "top_p": 0.9', '"temperature": 1.0'),
            "predict-without-the-prompt": ("[*plan.prompts[0].tokens, *text.outcome.tokens]", "text.outcome.tokens"),
        },
    ),
    *mutations(
        "python/specdec/cli/remote_chat.py",
        CHAT,
        {
            "chat-keeps-its-seed": ("        s.next_seed()\n", ""),
            "chat-forgets-a-stopped-answer": (
                "self._said.add(said, page.text)",
                "interrupted or self._said.add(said, page.text)",
            ),
            "chat-hides-text-without-a-step": ('self._show(self.text[self._shown :] + "\\n")', 'self._show("\\n")'),
            "chat-sends-our-fields-to-others": (
                'if self._ours is not None:\n            body["specdec"]',
                'if True:\n            body["specdec"]',
            ),
        },
    ),
    *mutations(
        "python/specdec/cli/remote.py",
        CHAT,
        {
            "half-an-answer-is-an-answer": (
                'if not line:\n                    raise RemoteError("the connection ended before the answer did")',
                "if not line:\n                    return",
            ),
            "an-error-in-a-stream-is-skipped": ('if chunk.get("error"):', "if False:"),
            "a-chat-without-its-key": ('self._headers["Authorization"] = f"Bearer {api_key}"', "pass"),
        },
    ),
]

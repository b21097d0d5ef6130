"""A client of a server, with the ``openai`` package (pip install openai).

specdec serve
python examples/client.py                    # or: client.py http://host:8000/v1 KEY
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none") -> None:
    client = OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    prompt = "def read(self, size=-1):\n"
    print(prompt, end="")
    for chunk in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=48,
        temperature=0.8,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_p": 0.05},  # what OpenAI does not have: vLLM's fields, and those of docs/server.md
    ):
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
    assert chunk.usage is not None and chunk.usage.completion_tokens_details is not None  # of the last chunk
    drafts = chunk.usage.completion_tokens_details
    accepted, rejected = drafts.accepted_prediction_tokens, drafts.rejected_prediction_tokens
    print(f"\n--- {chunk.usage.completion_tokens} tokens, {accepted} of them drafts; {rejected} drafts were rejected")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What somebody with a real chat model sees first."""

from __future__ import annotations

from pathlib import Path

import pytest
from specdec.cli.given_prompts import MeasuredPrompts
from specdec.cli.models import ModelOptions
from specdec.jobs.prompt_sets import INSTRUCT, prompt_set
from support.commands import run

pytestmark = pytest.mark.real


def test_a_question_is_answered(smollm2: Path):
    """In a sentence, without the template and its tokens."""
    asked = ("--target", smollm2, "--drafter", "lookup", "--max-new-tokens", 16)
    shown = run("generate", *asked, "--chat", "What is the capital of France?").stdout
    assert shown == "The capital of France is Paris.\n"
    assert run("generate", *asked, "--no-chat", "The capital of France is").stdout.startswith(
        "The capital of France is"
    )


def test_every_built_in_prompt_is_a_message_that_fits(smollm2: Path):
    at = ModelOptions(target=str(smollm2))
    found = MeasuredPrompts(per_category=6).questions(None, at)
    assert len(found) == 6 * len(INSTRUCT) == len(prompt_set("instruct")) and all(q.chat for q in found)
    lengths = [len(q.tokens(at.tokenizer)) for q in found]
    assert max(lengths) < 512 and all(q.prompt.endswith("<|im_start|>assistant\n") for q in found)

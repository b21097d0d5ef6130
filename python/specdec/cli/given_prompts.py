"""Where the prompts come from that a command measures, and whether they are a user's messages.

Nothing here imports torch before a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..jobs.prompt_sets import NAMES, prompt_set
from .option_groups import option
from .options import check_texts
from .terminal import remark
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..jobs.questions import Question
    from .models import ModelOptions


@dataclass(frozen=True)
class ChatOptions:
    """Prompts"""

    chat: bool | None = option(
        None,
        "Prompts are a user's messages, for the target's chat template, or with --no-chat texts to continue. Default: "
        "messages where there is a template.",
        "--chat/--no-chat",
        show_default=False,
    )

    def is_chat(self, tokenizer: PreTrainedTokenizerBase, own_prompts: bool) -> bool:
        """Whether prompts are messages. Says so where it is only the default of somebody's ``own_prompts``."""
        if self.chat and not tokenizer.chat_template:
            refuse("--chat", "--chat for a target without a chat template", "--no-chat, or a target with one")
        chat = bool(tokenizer.chat_template) if self.chat is None else self.chat
        if chat and own_prompts and self.chat is None:
            remark("prompts are messages for the target's chat template; --no-chat continues them as they stand", "dim")
        return chat


@dataclass(frozen=True)
class MeasuredPrompts(ChatOptions):
    """Prompts"""

    batch_file: Path | None = option(
        None,
        "Prompts: as specdec generate reads them, with a category if you like; or questions of Spec-Bench or "
        "SPEED-Bench, as JSON lines.",
    )
    prompt_set: str | None = option(
        None,
        f"Built-in prompts: {', '.join(NAMES)}. Default: instruct for a chat, else general; code for the embedded "
        "pair (of bench: general).",
        show_default=False,
    )
    category: list[str] | None = option(None, "Repeatable: prompts of these only.")
    per_category: int | None = option(
        None, "The first ones of each category. Default: 1 of the built-in ones, else all."
    )

    of_embedded = "code"  # the set for the embedded pair

    def __post_init__(self) -> None:
        check_counts(1, per_category=self.per_category)

    def given(self, prompts: Sequence[str] | None) -> bool:
        """Whether there are any but the default ones, from one source."""
        sources = [each for each in (prompts, self.batch_file, self.prompt_set) if each]
        if len(sources) > 1:
            refuse("PROMPT / --batch-file / --prompt-set", "several", "at most one of them")
        return bool(sources)

    def questions(self, prompts: Sequence[str] | None, at: ModelOptions) -> list[Question]:
        """The prompts of the arguments, of a file, or of a set; as a chat they are what the template makes of them."""
        own = self.given(prompts) and self.prompt_set is None
        texts = check_texts([*(prompts or ())])
        from ..jobs.questions import Question, choose, read_questions

        chat, most = self.is_chat(at.tokenizer, own), self.per_category
        if texts:
            found = [Question(i, i, text) for i, text in enumerate(texts)]
        elif self.batch_file is not None:
            found = read_questions(self.batch_file, lambda: at.tokenizer)
        else:
            default = "instruct" if chat else "general" if at.target else self.of_embedded
            found = prompt_set(self.prompt_set or default, at.tokenizer if chat else None)
            most = most or 1
        found = choose(found, self.category, most)
        return [question.as_message(at.tokenizer) for question in found] if chat else found

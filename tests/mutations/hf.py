"""Of ``model.generate(custom_generate=...)``: what processors and criteria are shown, and which settings hold."""

from .mutation import Mutation, mutations

PROCESSORS = "tests/hf/test_convert_processors.py"
CRITERIA = "tests/hf/test_criteria.py"
SPECULATE = "tests/hf/test_speculate.py"
ARGUMENTS = "tests/hf/test_speculate_arguments.py"
CONFIG = "tests/hf/test_generation_config.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/hf/convert_processors.py",
        PROCESSORS,
        {
            "hf-filters-in-any-order": ("in _WARPERS[:rank] and", "in _WARPERS and"),
            "hf-forgets-how-many-tokens-filters-keep": (
                'getattr(warper, "min_tokens_to_keep", 1) != 1',
                'getattr(warper, "min_tokens_to_keep", 1) < 1',
            ),
            "hf-forgets-what-filters-fill-in": ("!= -math.inf:\n        return False", "> 0:\n        return False"),
            "hf-counts-no-prompt-in-min-length": ("p.min_length - length)", "p.min_length)"),
            "hf-adds-a-bias-before-the-penalty": (
                "if bias and (penalised or arguments.logit_bias or",
                "if bias and (arguments.logit_bias or",
            ),
            "hf-keeps-the-last-of-two-biases": (
                "if bias and (penalised or arguments.logit_bias or",
                "if bias and (penalised or",
            ),
            "hf-processors-answer-for-the-first-row": ("whole[self._row : self._row + 1]", "whole[:1]"),
            "hf-holds-other-ends-back": (
                "type(p) is theirs.MinLengthLogitsProcessor and _same(p.eos_token_id, eos)",
                "type(p) is theirs.MinLengthLogitsProcessor",
            ),
        },
    ),
    *mutations(
        "python/specdec/hf/criteria.py",
        CRITERIA,
        {
            "hf-criteria-judge-the-first-row": ("done.flatten()[sequence]", "done.flatten()[0]"),
            "hf-criteria-are-asked-about-a-steps-last-token": (
                "for kept in range(1, new + 1):",
                "for kept in range(new, new + 1):",
            ),
            "hf-criteria-see-no-padding": ("torch.tensor([[*before, *text]]", "torch.tensor([[*text]]"),
            "hf-the-latest-end-counts": ("return min((end for", "return max((end for"),
        },
    ),
    *mutations(
        "python/specdec/hf/speculate.py",
        SPECULATE,
        {
            "hf-max-length-forgets-the-prompt": ("most = max(most - length, 1)", "most = max(most, 1)"),
            "hf-seeds-count-prompts": ("row % (config.num_return_sequences or 1)", "row"),
            "hf-ignores-torchs-generator": (
                "return torch.randint(-(2**63), 2**63 - 1, (size,))",
                "return list(range(size))",
            ),
            "hf-keeps-the-decoder-of-other-settings": ("or self._prepared.key != key:", "or False:"),
            "hf-streamer-never-ends": (
                "                self._streamer.end()\n",
                "                pass\n",
                ARGUMENTS,
            ),
            "hf-pads-with-zero": ("0 if pad is None else int(pad)", "0"),
        },
    ),
    *mutations(
        "python/specdec/hf/inputs.py",
        ARGUMENTS,
        {
            "hf-takes-padding-on-the-right": ("if mask is not None and not mask[:, -1].all():", "if False:"),
            "hf-takes-any-positions": ("((positions != expected) & (ones != 0)).any()", "False"),
            "hf-drops-what-else-the-model-is-fed": (
                "and value is not None and value is not False:",
                "and value is True:",
            ),
        },
    ),
    *mutations(
        "python/specdec/hf/assistance.py",
        f"{CONFIG} -k 'num_assistant or confidence or drafters'",
        {
            "hf-takes-what-transformers-filled-in": (
                "if fields[name] is None and configured != default:",
                "if fields[name] is None:",
            ),
            "hf-loses-the-threshold-of-the-configuration": (
                "confidence = ours.confidence if ours.confidence is not None else threshold",
                "confidence = ours.confidence",
            ),
        },
    ),
]

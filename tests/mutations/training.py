"""Of training: losses, what a draft is worth, texts to learn from, and going on after a kill."""

from .mutation import Mutation, mutations

LOSSES = "tests/training/test_distill_losses.py"
WORTH = "tests/training/test_held_out.py"
LESSONS = "tests/training/test_lessons.py"
TRAINER = "tests/training/test_trainer.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/training/losses.py",
        LOSSES,
        {
            "total-variation-is-twice-as-large": (".abs().sum(-1) / 2", ".abs().sum(-1)"),
            "forward-kl-weighs-by-the-draft": ("(log_p.exp() * (log_p - log_q))", "(log_q.exp() * (log_p - log_q))"),
            "reverse-kl-is-the-forward-one": ("(log_q.exp() * (log_q - log_p))", "(log_p.exp() * (log_p - log_q))"),
            "the-rest-of-the-tokens-is-nothing": (
                "log_q = torch.cat((log_q, _rest(log_q)), -1)",
                "log_q = torch.cat((log_q, _rest(log_q) * 0 + SMALLEST), -1)",
            ),
            "banned-tokens-have-no-floor": (".clamp(min=SMALLEST), wanted.log_p.clamp(min=SMALLEST)", ", wanted.log_p"),
            "mixtures-do-not-add-up-to-one": ("weight / total for", "weight for"),
        },
    ),
    *mutations(
        "python/specdec/training/held_out.py",
        WORTH,
        {
            "drafts-are-tested-after-a-rejection": ("reach *= chances[j]", "pass"),
            "the-last-token-is-drafted": ("min(num_drafts, n - i - 1)", "min(num_drafts, n - i)"),
            "drafts-are-accepted-twice-as-likely": (".exp().clamp(max=1)", ".exp().mul(2).clamp(max=1)"),
            "worth-of-the-tokens-before": ("logits.argmax(-1) == new", "logits.argmax(-1).roll(1) == new"),
        },
    ),
    *mutations(
        "python/specdec/training/packing.py",
        "tests/training/test_packing.py",
        {
            "every-epoch-has-one-order": ("* 1_000_003 + epoch)", "* 1_000_003)"),
            "an-order-without-its-seed": ("manual_seed(self._seed * 1_000_003 + epoch)", "manual_seed(epoch)"),
        },
    ),
    *mutations(
        "python/specdec/training/lessons.py",
        LESSONS,
        {
            "own-texts-depend-on-the-draft": ('seeds, [], rule="coupled"', 'seeds, [], rule="token"'),
            "written-texts-are-never-used-up": (
                "self.written[name] = texts[self._size :]",
                "self.written[name] = texts",
            ),
            "all-texts-are-given": ("name = self.source(step)", "name = GIVEN"),
        },
    ),
    *mutations(
        "python/specdec/training/checkpoint.py",
        TRAINER,
        {
            "a-checkpoint-without-the-optimiser": ("optimiser.state.get(parameter, {})", "{}"),
            "a-checkpoint-without-texts-to-come": ('tensors |= {f"text/', '{f"text/'),
            "other-settings-go-on": ("if changed:", "if False:"),
        },
    ),
    *mutations(
        "python/specdec/training/trainer.py",
        TRAINER,
        {
            "the-worst-weights-are-kept": (
                "score(found) > score(progress.best)",
                "score(found) < score(progress.best)",
            ),
            "a-loss-that-is-no-number-is-learned": ("if not math.isfinite(norm.item()):", "if False:"),
            "lines-of-lost-steps-stay": (
                "            log.end += len(line)\n        log.cut()",
                "            log.end += len(line)",
            ),
            "cached-logits-are-not-asked": ("self._cached is not None and blocks is not None", "False"),
        },
    ),
    *mutations(
        "python/specdec/training/distill.py",
        "tests/training/test_distill.py",
        {"a-training-goes-on-with-another-target": ('{"target": fingerprint(target), "draft"', '{"draft"')},
    ),
    *mutations(
        "python/specdec/training/board.py",
        "tests/training/test_board.py",
        {
            "curves-of-killed-trainings-stay": (', purge_step=row["step"]', ""),
            "depths-begin-at-zero": ("(row.get(name, ()), 1)", "(row.get(name, ()))"),
        },
    ),
    *mutations(
        "python/specdec/training/shards.py",
        TRAINER,
        {
            "a-cache-of-other-data-serves": ("if key != self._key:", "if False:"),
            "a-killed-cache-begins-again": ("if not self._path(number).exists():", "if True:"),
        },
    ),
    *mutations(
        "python/specdec/training/texts.py",
        "tests/training/test_training_texts.py",
        {
            "evaluation-prompts-are-learned": ("or any(p in text for p in wanted)", ""),
            "held-out-texts-are-learned": ("text.strip() in aside or ", ""),
            "duplicates-are-learned": ("if digest in seen:", "if False:"),
            "results-without-their-prompts": ("else prompts[number] + _string(", "else _string("),
            "failed-results-are-learned": ('"" if row.get("status") != "OK" else ', ""),
        },
    ),
]

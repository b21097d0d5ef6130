"""Of OpenAI's endpoints: stop strings, what is told of tokens and steps, seeds, and requests that end early."""

from .mutation import Mutation, mutations

ROOM, TESTS = "python/specdec/serving/server", "tests/serving/server"

MUTATIONS: list[Mutation] = [
    *mutations(
        f"{ROOM}/stop_cut.py",
        f"{TESTS}/test_stop_cut.py",
        {
            "cut-forgets-beginnings-within": (
                "while matched and string[matched] != character:\n                matched = fallbacks[matched]",
                "while matched and string[matched] != character:\n                matched = 0",
            ),
            "cut-takes-the-first-of-several": ("longest = max(longest, matched)", "longest = longest or matched"),
            "cut-holds-nothing-back": ("final = len(whole) - max(self._matched)", "final = len(whole)"),
            "cut-holds-too-much-back": ("len(whole) - max(self._matched)", "len(whole) - max(map(len, self._strings))"),
        },
    ),
    *mutations(
        f"{ROOM}/texts.py",
        f"{TESTS}/test_server_texts.py",
        {
            "text-tells-tokens-that-were-cut-off": ("[*filter(self._begins, self._tokens)]", "self._tokens"),
            "text-tells-tokens-before-their-text": (
                "return token.start < self._final",
                "return token.start <= self._final",
            ),
            "text-forgets-its-last-step": (
                "if any(piece := self._read(updates)):",
                "if (piece := self._read(updates)).text:",
            ),
            "text-tells-steps-that-were-cut-off": (
                "last.start + len(last.text) <= self._final",
                "last.start <= self._final",
            ),
        },
    ),
    *mutations(
        f"{ROOM}/plan.py",
        f"{TESTS}/test_clients.py",
        {
            "copies-share-a-seed": ("_wrapped(seed + copy)", "_wrapped(seed)"),
            "prompts-share-a-drawn-seed": (
                "seeds = [body.seed if body.seed is not None else secrets.randbelow(2**53) for _ in prompts]",
                "seeds = [body.seed if body.seed is not None else secrets.randbelow(2**53)] * len(prompts)",
            ),
            "ignore-eos-is-ignored": ("() if body.ignore_eos else lane.eos", "lane.eos"),
            "stop-token-ids-replace-those-of-the-model": (
                "{*(() if body.ignore_eos else lane.eos), *(body.stop_token_ids or ())}",
                "set(body.stop_token_ids or (() if body.ignore_eos else lane.eos))",
            ),
            "prediction-is-ignored": ("prediction=prediction,", ""),
        },
    ),
    *mutations(
        f"{ROOM}/usage.py",
        f"{TESTS}/test_clients.py",
        {
            "usage-rejects-all-drafts": (
                '"rejected_prediction_tokens": drafted - accepted',
                '"rejected_prediction_tokens": drafted',
            ),
            "histogram-is-cumulative": ("str(i): count - at_least[i + 1]", "str(i): count"),
        },
    ),
    *mutations(
        f"{ROOM}/generation.py",
        f"{TESTS}/test_early_ends.py",
        {
            "refused-request-leaves-texts": (
                "            await self.close()\n            if isinstance",
                "            if isinstance",
            ),
            "siblings-of-a-failure-live-on": (
                "        async with asyncio.TaskGroup() as group:\n"
                "            tasks = [group.create_task(each) for each in work]\n"
                "    except BaseExceptionGroup as errors:\n"
                "        raise errors.exceptions[0] from None\n",
                "        tasks = [asyncio.ensure_future(each) for each in work]\n"
                "        await asyncio.gather(*tasks)\n"
                "    finally:\n"
                "        pass\n",
            ),
        },
    ),
]

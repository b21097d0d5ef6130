"""Decodes by vLLM or OpenVINO, with an environment's own Python, for ``rivals.py``: each line of standard input is a
JSON object with ``prompt``, token ids, and ``new``, how many tokens to write; each line of standard output says how
many were written, and the seconds.

    /path/to/python bench/rival_worker.py vllm real_models/SmolLM2-135M-Instruct --dtype bfloat16 --lookup
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

Decode = Callable[[list[int], int], int]


def vllm(path: str, dtype: str, threads: int, lookup: int) -> Decode:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    from vllm import LLM, SamplingParams, TokensPrompt

    more = {}
    if lookup:
        ngram = {"method": "ngram", "num_speculative_tokens": lookup, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        more["speculative_config"] = ngram
    model = LLM(path, dtype=dtype, max_model_len=2048, max_num_seqs=1, enable_prefix_caching=False, **more)

    def decode(prompt: list[int], new: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        (text,) = model.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
        return len(text.outputs[0].token_ids)

    return decode


def openvino(path: str, dtype: str, threads: int, lookup: int) -> Decode:
    import numpy
    import openvino
    import openvino_genai

    # It reads a GGUF file as it is; what it computes in is its own choice.
    settings = {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if lookup else {})}
    pipeline = openvino_genai.LLMPipeline(path, "CPU", **settings)
    config = pipeline.get_generation_config()
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = lookup, 3

    def decode(prompt: list[int], new: int) -> int:
        config.max_new_tokens = config.min_new_tokens = new
        ids = numpy.array([prompt], dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return len(pipeline.generate(inputs, config).tokens[0])

    return decode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=("vllm", "openvino"))
    parser.add_argument("path")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup", type=int, default=0, help="drafts by prompt lookup")
    given = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the programs print themselves
    decode = {"vllm": vllm, "openvino": openvino}[given.program](given.path, given.dtype, given.threads, given.lookup)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        written = decode(asked["prompt"], asked["new"])
        print(json.dumps({"written": written, "seconds": time.perf_counter() - began}), file=replies, flush=True)


if __name__ == "__main__":
    main()

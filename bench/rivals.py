"""Decoding on a CPU beside other programs, with the same weights, prompts and threads, greedily and one text at a time:
specdec, transformers and, where it is installed, llama.cpp (``pip install llama-cpp-python gguf``).

    python bench/rivals.py real_models/SmolLM2-135M-Instruct --gguf SmolLM2-135M-Instruct.Q4_1.gguf

The folder is what ``specdec convert`` made of the GGUF file. For llama.cpp the file's weights are written anew in the
dtype of each row; bfloat16 is what their rounding gives for all. Each way has its turn with each prompt, in every
round.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import typer
from measure import ratios, summary
from specdec import PromptLookupDrafter, SpeculativeDecoder, SuffixDrafter
from specdec.evaluation.contenders import LOOKUP_DEFAULT
from specdec.jobs.prompt_sets import prompt_set
from specdec.models.loading import load_model, load_tokenizer
from specdec.models.stored_weights import compute_in_float32

LLAMA, LLAMA_LOOKUP = "llama.cpp", "llama.cpp, prompt lookup"
KINDS = {"float32": "F32", "bfloat16": "BF16"}  # of weights; what GGUF calls them

Decode = Callable[[list[int], int], int]  # prompt and new tokens; returns how many were written


def own(folder: str, dtype: str) -> dict[str, Decode]:
    model = load_model(folder, "float32")
    if dtype == "bfloat16":
        model = compute_in_float32(model.bfloat16())

    def decode(decoder: SpeculativeDecoder) -> Decode:
        return lambda prompt, new: len(decoder.generate([prompt], max_new_tokens=new, eos_token_id=[]).tokens[0])

    return {
        "specdec": decode(SpeculativeDecoder(model, None, 0)),
        "specdec, suffix": decode(SpeculativeDecoder(model, SuffixDrafter())),
        "specdec, prompt lookup": decode(SpeculativeDecoder(model, PromptLookupDrafter())),
    }


def transformers(folder: str, dtype: str) -> dict[str, Decode]:
    model: Any = load_model(folder, dtype)

    def decode(**more: int) -> Decode:
        def run(prompt: list[int], new: int) -> int:
            ids = torch.tensor([prompt])
            settings = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **more).shape[1] - len(prompt)

        return run

    return {"transformers": decode(), "transformers, prompt lookup": decode(prompt_lookup_num_tokens=LOOKUP_DEFAULT)}


def rewritten(source: Path, kind: str, folder: Path) -> Path:
    """Writes the file's weights in another dtype; norms and biases stay float32, as llama.cpp has them."""
    import gguf

    reader, path = gguf.GGUFReader(source), folder / f"{kind}.gguf"
    fields: dict[str, Any] = reader.fields
    writer = gguf.GGUFWriter(path, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    to = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim == 2 and kind != "F32":
            writer.add_tensor(tensor.name, gguf.quantize(weights, to), raw_dtype=to)
        else:
            writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp(path: Path, threads: int) -> dict[str, Decode]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def decode(**more: object) -> Decode:
        settings = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        llama = Llama(str(path), **settings, **more)

        def run(prompt: list[int], new: int) -> int:
            llama.reset()
            written = 0
            for _ in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
                written += 1
                if written == new:
                    break
            return written

        return run

    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_DEFAULT)
    return {LLAMA: decode(), LLAMA_LOOKUP: decode(draft_model=draft, logits_all=True)}


def race(ways: dict[str, Decode], prompts: Sequence[list[int]], new: int, rounds: int) -> dict[str, list[float]]:
    """Returns tokens a second, the reading of the prompt included, by way and then by round and prompt."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for decode in ways.values():
        decode(prompts[0], 4)
    for _ in range(rounds):
        for prompt in prompts:
            for name, decode in ways.items():
                began = time.perf_counter()
                written = decode(prompt, new)
                speeds[name].append(written / (time.perf_counter() - began))
    return speeds


def main(
    folder: Annotated[str, typer.Argument(help="of the model, in transformers' format")],
    gguf: Annotated[Path | None, typer.Option(help="the file that the folder was made of, for llama.cpp")] = None,
    dtypes: Annotated[str, typer.Option(help="of the weights, separated by commas")] = "float32,bfloat16",
    new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    names = report.read_names("dtypes", dtypes, KINDS)
    new_tokens, rounds = (8, 1) if quick else (new_tokens, rounds)
    tokenizer = load_tokenizer("folder", folder)
    first = {q.category: q for q in reversed(prompt_set("general"))}
    asked = {category: q.as_message(tokenizer).tokens(tokenizer) for category, q in first.items()}
    results = report.Report(
        "rivals", torch.device("cpu"), json_path, threads, quick=quick, target=Path(folder).name,
        new_tokens=new_tokens, prompts={category: len(ids) for category, ids in asked.items()},
    )  # fmt: skip
    for dtype in names:
        ways = {**own(folder, dtype), **transformers(folder, dtype)}
        with tempfile.TemporaryDirectory() as made:
            if gguf is not None:
                file = rewritten(gguf, KINDS[dtype], Path(made))
                ways |= llama_cpp(file, torch.get_num_threads())
            speeds = race(ways, list(asked.values()), new_tokens, rounds)
        rows: list[dict[str, object]] = []
        for name, own_speeds in speeds.items():
            beside = {"over_llama_cpp": ratios(own_speeds, speeds[LLAMA])} if LLAMA in speeds else {}
            rows.append({"weights": dtype, "method": name, "tokens_per_second": summary(own_speeds), **beside})
            results.add(rows[-1])
        results.show(f"{Path(folder).name}, {dtype}", rows, ("method", "tokens_per_second", "over_llama_cpp"))
    results.finish()


if __name__ == "__main__":
    typer.run(main)

"""The same weights in each kind that is compared: as GGUF files, which several programs read, and as models of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from report import refuse
from specdec.models.exchanged.stored_weights import compute_in_float32, pack_weights
from specdec.models.load.loading import load_model
from specdec.models.load.reduced_head import IDS, reduced_ids
from specdec_layers import Packing
from transformers import PreTrainedModel

KINDS = {"float32": "F32", "bfloat16": "BF16", "8 bits": "Q8_0", "4 bits": "Q4_0"}  # of weights; what GGUF calls them
PACKED = ("8 bits", "4 bits")


def stored(folder: str | Path, kind: str) -> PreTrainedModel:
    """The model of a folder with its weights in a kind, which computes in float32."""
    model = load_model(folder, "float32")
    if kind == "bfloat16":
        for weight in model.parameters():
            weight.data = weight.data.bfloat16()
        compute_in_float32(model)
    elif kind in PACKED:
        pack_weights(model, Packing[KINDS[kind]])
    return model


def rewritten(source: Path, kind: str, folder: Path) -> Path:
    """Writes a file's weights in another type."""
    import gguf

    reader = gguf.GGUFReader(source)
    tensors = ((tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
    return _write(folder / f"{kind}.gguf", reader, {}, tensors, kind)


def of_draft(draft: str | Path, source: Path, kind: str, folder: Path) -> Path:
    """Writes the folder of a draft as a file, with the tokenizer of its target's file ``source``.

    llama.cpp has no head that covers a part of the vocabulary: the other tokens get rows of zeros here, and with them
    logits of 0, below the best one wherever a text goes on as texts do.
    """
    import gguf

    model: Any = load_model(draft, "float32")
    c = model.config
    if c.model_type != "llama":
        refuse("draft", f"a model of type {c.model_type!r}", "one of type 'llama', whose tensors are renamed here")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    ids = reduced_ids(model)

    def tensors() -> Iterable[tuple[str, Any]]:
        for name, weight in model.state_dict().items():
            if name == IDS or (name == "lm_head.weight" and c.tie_word_embeddings):
                continue
            if name == "lm_head.weight" and ids is not None:
                weight = weight.new_zeros(c.vocab_size, c.hidden_size).index_copy(0, ids, weight)
            if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, transformers the halves of a head
                weight = weight.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
            stem, _, suffix = name.rpartition(".")
            yield f"{names.get_name(stem)}.{suffix}", weight.contiguous().numpy()

    own = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.dimension_count": c.head_dim,
        "rope.freq_base": c.rope_parameters["rope_theta"],
    }  # fmt: skip
    replaced = {f"llama.{key}": value for key, value in own.items()}
    return _write(folder / f"draft.{kind}.gguf", gguf.GGUFReader(source), replaced, tensors(), kind)


def _write(path: Path, reader: Any, replaced: Mapping[str, Any], tensors: Iterable[tuple[str, Any]], kind: str) -> Path:
    """Norms and biases stay float32, as llama.cpp has them."""
    import gguf

    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, replaced.get(name, field.contents()), field.types[0], sub_type=inner)
    to = gguf.GGMLQuantizationType[kind]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    for name, weight in tensors:
        if weight.ndim == 2 and kind != "F32":
            writer.add_tensor(name, gguf.quantize(weight, to), raw_dtype=to)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

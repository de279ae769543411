"""Random Llamas small enough to write in a test, and a driver that runs requests through an
executor.

Everything here is built without the code under test: folders are written by ``transformers``, GGUF
files by the ``gguf`` package with the row order of llama.cpp's converter, and the reference logits
are those of ``transformers`` over the same values.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from engine.batch import FEED, Batch, BatchItem, RowInit, StepResult
from engine.config import EngineConfig
from engine.torch_executor import TorchExecutor, load_torch_executor
from transport.messages import SamplingParams

VOCAB_SIZE = 160
GREEDY = SamplingParams(temperature=0.0)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that logits differ clearly
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


def random_model(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A model of ``family`` with random weights and biases, and norms that are not all ones."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SHAPE | settings)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def load(path: Path, **settings: Any) -> TorchExecutor:
    """An executor over a small pool, in float32 unless told otherwise."""
    defaults = {"dtype": "float32", "kv_pages": 128, "page_size": 4, "threads": 1}
    return load_torch_executor(EngineConfig(model_path=str(path), **defaults | settings))


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits after each of ``tokens``: ``float32[len(tokens), vocab]``."""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def is_greedy(model: PreTrainedModel, prompt: list[int], output: list[int]) -> bool:
    """Whether ``transformers`` would generate exactly ``output``: each token is the most likely one
    after those before it."""
    likely = reference_logits(model, prompt + output).argmax(dim=1).tolist()
    return bool(likely[len(prompt) - 1 : -1] == output)


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def converter_rows(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order in which llama.cpp's converter writes the rows of q and k (``permute`` there)."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    extra: dict[str, Any] | None = None,
    drop: str = "",
    architecture: str = "llama",
) -> None:
    """Write ``model`` with its matrices in ``kind``, and give it the values that ``kind`` kept of
    them.

    ``extra`` adds float settings or tensors (arrays); ``drop`` leaves out the tensor of that name.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"<{index}>" for index in range(VOCAB_SIZE)])
    writer.add_array("tokenizer.ggml.scores", [0.0] * VOCAB_SIZE)
    for name, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_float32(name, value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            target = f"blk.{layer}.{GGUF_NAMES[stem]}.{part}"
        else:
            target = f"{GGUF_NAMES[stem]}.{part}"
        rows = np.arange(weight.shape[0])
        if stem == "self_attn.q_proj":
            rows = converter_rows(weight.shape[0], config.num_attention_heads)
        elif stem == "self_attn.k_proj":
            rows = converter_rows(weight.shape[0], config.num_key_value_heads)
        written = weight.numpy()[rows]
        used = kind if weight.dim() == 2 else GGMLQuantizationType.F32
        data = gguf.quantize(written, used)
        weight.copy_(torch.from_numpy(gguf.dequantize(data, used)[np.argsort(rows)].copy()))
        if target != drop:
            writer.add_tensor(target, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- driving an executor --------------------------------------------------------------------------


@dataclass
class Request:
    row: int
    tokens: list[int]
    """Prompt and output, as far as results have come back."""
    prompt_len: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    pages: list[int]
    computed: int
    """Tokens whose keys and values are in the pool."""
    started: bool = False
    results: list[Any] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Hands out pages in a shuffled order and builds batches, as a scheduler would."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.page_size = executor.kv.layout.page_size
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(executor.num_pages, generator=generator).tolist()
        self._step = 0
        self._rows = 0

    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        stop_ids: tuple[int, ...] = (),
        shared_pages: list[int] | None = None,
        output: list[int] | None = None,
    ) -> Request:
        """A request on a new row; ``shared_pages`` hold the start of its prompt (a prefix hit), and
        ``output`` is what it has from an earlier life."""
        pages = list(shared_pages or ())
        request = Request(
            row=self._rows,
            tokens=prompt + (output or []),
            prompt_len=len(prompt),
            sampling=sampling,
            stop_ids=stop_ids,
            pages=pages,
            computed=len(pages) * self.page_size,
        )
        self._rows += 1
        return request

    def batch(self, *work: tuple[Request, int], sample: bool | None = None) -> Batch:
        """One step in which each request computes so many tokens; it must be ordered decodes first.

        ``sample`` forces or forbids sampling; by default a request samples if nothing of it is
        left.
        """
        tokens, items, inits = array("q"), [], []
        qo_indptr, kv_indptr = array("q", [0]), array("q", [0])
        kv_indices, last_page_len = array("q"), array("q")
        for request, count in work:
            end = request.computed + count
            while len(request.pages) * self.page_size < end:
                request.pages.append(self._free.pop())
            new = request.tokens[request.computed : end]
            if count == 1 and request.output and end == len(request.tokens) and request.started:
                new = [FEED]
            if not request.started:
                request.started = True
                inits.append(
                    RowInit(
                        request.row,
                        list(request.tokens),
                        request.prompt_len,
                        request.sampling,
                        request.stop_ids,
                    )
                )
            used = -(-end // self.page_size)
            tokens.extend(new)
            kv_indices.extend(request.pages[:used])
            qo_indptr.append(len(tokens))
            kv_indptr.append(len(kv_indices))
            last_page_len.append(end - (used - 1) * self.page_size)
            samples = end == len(request.tokens) if sample is None else sample
            items.append(BatchItem("t:0", 0, request.row, request.computed, count, samples))
        self._step += 1
        return Batch(
            step=self._step,
            page_size=self.page_size,
            items=tuple(items),
            tokens=tokens,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=last_page_len,
            rows=tuple(inits),
        )

    def step(self, *work: tuple[Request, int]) -> StepResult:
        """Run one step and book its results."""
        batch = self.batch(*work)
        result = self.executor.execute(batch)
        for (request, count), sampled in zip(work, result.sampled, strict=True):
            request.computed += count
            if sampled.token is not None:
                request.tokens.append(sampled.token)
                request.results.append(sampled)
        return result

    def logits(self, *work: tuple[Request, int]) -> Tensor:
        """Run one step without sampling: ``[len(work), vocab]`` after each request's last new
        token."""
        logits = self.executor.logits(self.batch(*work, sample=True))
        for request, count in work:
            request.computed += count
        return logits

    def generate(self, requests: list[Request], count: int, chunk: int = 1000) -> None:
        """Run all ``requests`` together until each has ``count`` output tokens; prompts in
        chunks."""
        while True:
            work = [
                (request, min(chunk, len(request.tokens) - request.computed))
                for request in requests
                if len(request.output) < count
            ]
            if not work:
                return
            self.step(*sorted(work, key=lambda item: item[1] > 1))

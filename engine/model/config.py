"""The shape of a Llama-family model, and the names and shapes of its tensors.

Loaders translate a file's own metadata into :class:`ModelConfig`; nothing after them knows where a
model came from. Tensors go by their Hugging Face names
(``model.layers.0.self_attn.q_proj.weight``), whatever the file calls them.
"""

from dataclasses import dataclass


class ModelLoadError(Exception):
    """A model cannot be served: broken file, missing tensor, wrong shape, unsupported architecture.

    The message names the file, the tensor or setting, and what was expected.
    """


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency-dependent RoPE scaling of Llama 3.1 (``rope_type: llama3`` in Hugging Face's
    configuration)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass must know. Counts are of elements, heads, layers or tokens as the name
    says."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    rope_scaling: float | Llama3Scaling = 1.0
    """A number divides every position (linear scaling)."""
    attention_bias: bool = False
    """Biases on q, k and v (Qwen2)."""
    output_bias: bool = False
    """A bias on the attention's output projection as well (Llama with ``attention_bias``)."""
    tied_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "LlamaForCausalLM"
    """The class that Hugging Face's library would load it with: for people, computes nothing."""

    @property
    def qkv_heads(self) -> int:
        """Heads in one token's fused projection: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads

    def check(self, source: str) -> None:
        """Raise :class:`ModelLoadError` for numbers that no Llama can have, naming ``source``."""
        sizes = {
            "vocabulary size": self.vocab_size,
            "hidden size": self.hidden_size,
            "intermediate size": self.intermediate_size,
            "number of layers": self.num_layers,
            "number of heads": self.num_heads,
            "number of key/value heads": self.num_kv_heads,
            "head dimension": self.head_dim,
            "context length": self.context_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ModelLoadError(f"{source}: {name} is {size}, expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{source}: {self.num_heads} heads cannot share {self.num_kv_heads} "
                "key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"{source}: head dimension {self.head_dim} is odd, RoPE needs pairs"
            )


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by name, with the shape it must have: ``(out_features,
    in_features)``."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_size, hidden),
            prefix + "self_attn.k_proj.weight": (kv_size, hidden),
            prefix + "self_attn.v_proj.weight": (kv_size, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_size),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
        if config.attention_bias:
            shapes |= {
                prefix + "self_attn.q_proj.bias": (q_size,),
                prefix + "self_attn.k_proj.bias": (kv_size,),
                prefix + "self_attn.v_proj.bias": (kv_size,),
            }
        if config.output_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
    return shapes

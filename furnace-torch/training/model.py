"""A plain PyTorch Llama decoder whose numbers and tensor names match transformers' LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model; the field names are those of a Hugging Face config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of shape [length, head_dim], in the rotate-half layout."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / config.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads of shape [batch, heads, length, head_dim] by their positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with grouped key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        query = self.q_proj(hidden).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        key = rotate(key, cos, sin).repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        query = rotate(query, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class Mlp(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """One decoder layer: attention, then the feed-forward part, each on a normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Decoder(nn.Module):
    """Embedding, layers and the last normalisation: what transformers calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyLlama(nn.Module):
    """The language model; input and output embeddings are one tensor."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos, sin = rotary_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        residual_std = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if ends_residual else config.initializer_range)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return logits [batch, length, vocab] for token ids [batch, length].

        Where `documents` [batch, length] numbers the documents that share a window, none sees another.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        mask = None
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same & torch.ones(length, length, dtype=torch.bool).tril()
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin, mask)
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        """Return the number of trained numbers, the shared embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

//! What a decoder looks like.

use crate::error::{Result, invalid};
use crate::kernels::Activation;

/// No size is larger, so that products of a few of them are no overflow.
const MAX_SIZE: usize = 1 << 28;

/// Rotary frequencies.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Radians a position, for each pair (i, i + head_dim / 2).
    pub frequencies: Vec<f32>,
    /// What the cosine and sine of each pair are multiplied by.
    pub scales: Vec<f32>,
}

/// What differs between layers.
#[derive(Clone, Copy, Debug)]
pub struct LayerConfig {
    /// How many tokens a token sees, itself included; None for all before it.
    pub window: Option<usize>,
    /// Which of `Config::ropes`; None for no rotation.
    pub rope: Option<usize>,
}

/// Sizes and variants; the names are those of furnace's `DecoderSpec`.
#[derive(Clone, Debug)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    pub rms_norm_eps: f32,
    pub activation: Activation,
    pub embedding_scale: f32,
    pub attention_scale: f32,
    pub residual_scale: f32,
    pub logit_scale: f32,
    pub attention_soft_cap: Option<f32>,
    pub logit_soft_cap: Option<f32>,
    pub ropes: Vec<Rope>,
    pub layers: Vec<LayerConfig>,
}

/// What the operator grants.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Most tokens of a sequence.
    pub max_context: usize,
    /// Most sequences at once.
    pub max_open: usize,
    /// Most blocks of the KV cache.
    pub kv_blocks: usize,
}

impl Config {
    /// Checks the values against each other.
    ///
    /// # Errors
    /// `Invalid`, naming what is wrong.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("num_layers", self.layers.len()),
        ];
        for (name, size) in sizes {
            if !(1..=MAX_SIZE).contains(&size) {
                return invalid(format!("{name} is {size}; it must be between 1 and {MAX_SIZE}"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) || !self.head_dim.is_multiple_of(2) {
            return invalid("num_heads must be a multiple of num_kv_heads, and head_dim even".into());
        }
        let half = self.head_dim / 2;
        if self.ropes.iter().any(|rope| rope.frequencies.len() != half || rope.scales.len() != half) {
            return invalid(format!("a table of rotary frequencies has not the length {half}"));
        }
        if self.layers.iter().any(|layer| layer.window == Some(0) || layer.rope >= Some(self.ropes.len())) {
            return invalid("a layer has a window of 0, or a table of frequencies that is not there".into());
        }
        Ok(())
    }
}

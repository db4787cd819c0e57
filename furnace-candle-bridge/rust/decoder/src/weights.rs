//! The weights of a decoder, by role.

use std::collections::HashMap;

use crate::config::Config;
use crate::error::{Result, invalid};
use crate::kernels::Kernels;
use crate::linear::Linear;
use crate::ops::Norm;
use crate::packed::Packed;
use crate::stored::StoredType;

/// Weights on their way from the file; the roles are those of furnace's `DecoderSpec.tensor_shapes`.
pub struct Weights {
    kernels: &'static Kernels,
    matrices: HashMap<String, Packed>,
    vectors: HashMap<String, Vec<f32>>,
}

impl Weights {
    /// No weights yet, for the best kernels of this processor.
    pub fn new() -> Self {
        Weights::for_kernels(&Kernels::available()[0])
    }

    /// The same, for other kernels.
    pub fn for_kernels(kernels: &'static Kernels) -> Self {
        Weights { kernels, matrices: HashMap::new(), vectors: HashMap::new() }
    }

    /// The kernels that the weights are packed for.
    pub fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    /// Packs a matrix [outputs, inputs] from its stored bytes.
    ///
    /// # Errors
    /// As of `Packed::new`, with the role.
    pub fn add_matrix(&mut self, role: &str, stored: &str, outputs: usize, inputs: usize, rows: &[u8]) -> Result<()> {
        let packed =
            StoredType::named(stored).and_then(|stored| Packed::new(self.kernels, stored, outputs, inputs, rows));
        match packed {
            Ok(packed) => {
                self.matrices.insert(role.into(), packed);
                Ok(())
            }
            Err(crate::error::Error::Invalid(reason)) => invalid(format!("{role:.64}: {reason}")),
            Err(error) => Err(error),
        }
    }

    /// Adds a vector: a norm's weight, or a bias.
    pub fn add_vector(&mut self, role: &str, values: Vec<f32>) {
        self.vectors.insert(role.into(), values);
    }

    fn matrix(&mut self, role: &str, outputs: usize, inputs: usize) -> Result<Packed> {
        match self.matrices.remove(role) {
            Some(packed) if (packed.outputs(), packed.inputs()) == (outputs, inputs) => Ok(packed),
            Some(packed) => invalid(format!(
                "the matrix {role} is {} x {}, not {outputs} x {inputs}",
                packed.outputs(),
                packed.inputs()
            )),
            None => invalid(format!("the matrix {role} is missing")),
        }
    }

    fn linear(&mut self, prefix: &str, parts: &[(&str, usize)], inputs: usize) -> Result<Linear> {
        let (mut matrices, mut bias) = (Vec::new(), Vec::new());
        for (name, outputs) in parts {
            matrices.push(self.matrix(&format!("{prefix}{name}"), *outputs, inputs)?);
            bias.extend(self.vectors.remove(&format!("{prefix}{name}.bias")).unwrap_or_default());
        }
        Linear::new(self.kernels, matrices, if bias.is_empty() { None } else { Some(bias) })
    }

    fn norm(&mut self, role: &str, widths: &[usize], eps: f32) -> Result<Option<Norm>> {
        match self.vectors.remove(role) {
            None => Ok(None),
            Some(weight) if widths.contains(&weight.len()) => Ok(Some(Norm::new(self.kernels, weight, eps))),
            Some(weight) => invalid(format!("the vector {role} has the length {}, not {widths:?}", weight.len())),
        }
    }
}

impl Default for Weights {
    fn default() -> Self {
        Self::new()
    }
}

/// One layer; norms that it doesn't have are None.
pub(crate) struct Layer {
    pub attention_norm: Option<Norm>,
    pub qkv: Linear,
    /// For queries and keys, of a head or of all heads at once.
    pub qk_norms: Option<[Norm; 2]>,
    pub attention_output: Linear,
    pub attention_post_norm: Option<Norm>,
    pub mlp_norm: Option<Norm>,
    pub gate_up: Linear,
    pub down: Linear,
    pub mlp_post_norm: Option<Norm>,
}

impl Layer {
    /// Takes the weights of a layer.
    ///
    /// # Errors
    /// `Invalid`: one is missing or has another size.
    pub fn take(weights: &mut Weights, config: &Config, index: usize) -> Result<Self> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.rms_norm_eps);
        let (queries, keys) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let attention = format!("layers.{index}.attention.");
        let mlp = format!("layers.{index}.mlp.");
        let query_norm = weights.norm(&format!("{attention}q_norm"), &[config.head_dim, queries], eps)?;
        let key_norm = weights.norm(&format!("{attention}k_norm"), &[config.head_dim, keys], eps)?;
        Ok(Layer {
            attention_norm: weights.norm(&format!("{attention}norm"), &[hidden], eps)?,
            qkv: weights.linear(&attention, &[("q", queries), ("k", keys), ("v", keys)], hidden)?,
            qk_norms: match (query_norm, key_norm) {
                (Some(query), Some(key)) => Some([query, key]),
                (None, None) => None,
                _ => return invalid(format!("layer {index} has a norm for queries or keys alone")),
            },
            attention_output: weights.linear(&attention, &[("o", hidden)], queries)?,
            attention_post_norm: weights.norm(&format!("{attention}post_norm"), &[hidden], eps)?,
            mlp_norm: weights.norm(&format!("{mlp}norm"), &[hidden], eps)?,
            gate_up: weights.linear(&mlp, &[("gate", inner), ("up", inner)], hidden)?,
            down: weights.linear(&mlp, &[("down", hidden)], inner)?,
            mlp_post_norm: weights.norm(&format!("{mlp}post_norm"), &[hidden], eps)?,
        })
    }
}

/// What is before and behind the layers.
pub(crate) struct Ends {
    /// None where the head's weights are the embedding.
    pub embedding: Option<Packed>,
    pub norm: Norm,
    pub head: Linear,
}

impl Ends {
    /// Takes the weights; a head that is missing is the embedding again.
    ///
    /// # Errors
    /// `Invalid`: one is missing or has another size.
    pub fn take(weights: &mut Weights, config: &Config) -> Result<Self> {
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let embedding = weights.matrix("embed", vocab, hidden)?;
        let Some(norm) = weights.norm("norm", &[hidden], config.rms_norm_eps)? else {
            return invalid("the vector norm is missing".into());
        };
        if weights.matrices.contains_key("head") {
            let head = weights.linear("", &[("head", vocab)], hidden)?;
            return Ok(Ends { embedding: Some(embedding), norm, head });
        }
        Ok(Ends { embedding: None, norm, head: Linear::new(weights.kernels, vec![embedding], None)? })
    }
}

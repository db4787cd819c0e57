//! The model: its weights, and one flat forward pass over the rows of all chunks.

use candle_core::{Device, Tensor};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::attention::Attention;
use crate::batch::Plan;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::kv::{KvShape, Sequence};
use crate::ops::{AddScaled, Angles, Gate, Norm, Prepare, for_each_row};
use crate::tensors::with_floats;
use crate::weights::{Ends, Layer, Weights};

/// A decoder's weights and threads; may be shared by decoders.
pub struct Model {
    config: Config,
    shape: KvShape,
    kernels: &'static Kernels,
    layers: Vec<Layer>,
    ends: Ends,
    pool: ThreadPool,
}

/// What a step returns: rows of logits, or of hidden values.
#[derive(Debug, PartialEq)]
pub struct Rows {
    pub values: Vec<f32>,
    pub width: usize,
}

impl Model {
    /// Makes a model of weights.
    ///
    /// # Errors
    /// `Invalid`: a size is out of bounds, or a weight is missing or has another size. `Failed`: there are no threads.
    pub fn new(config: Config, mut weights: Weights, threads: usize) -> Result<Self> {
        config.check()?;
        let layers =
            (0..config.layers.len()).map(|index| Layer::take(&mut weights, &config, index)).collect::<Result<_>>()?;
        Ok(Model {
            shape: KvShape { layers: config.layers.len(), heads: config.num_kv_heads, head_dim: config.head_dim },
            kernels: weights.kernels(),
            layers,
            ends: Ends::take(&mut weights, &config)?,
            pool: thread_pool(threads)?,
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What a block of its KV cache holds.
    pub fn kv_shape(&self) -> KvShape {
        self.shape
    }

    /// The name of the kernels that it computes with.
    pub fn kernels(&self) -> &'static str {
        self.kernels.name()
    }

    /// The threads that it computes with.
    pub(crate) fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// Rows of a sequence that are best attended to together.
    pub(crate) fn run_rows(&self) -> usize {
        (self.kernels.tile_rows() * self.config.num_kv_heads / self.config.num_heads).max(1)
    }

    /// Computes a step's rows, and writes its keys and values to the sequences, which have room for them.
    ///
    /// # Errors
    /// `Failed`.
    pub(crate) fn forward(&self, plan: &Plan, sequences: &mut [Sequence]) -> Result<Rows> {
        let hidden_size = self.config.hidden_size;
        if plan.tokens.is_empty() {
            return Ok(Rows { values: vec![], width: self.config.vocab_size });
        }
        let ropes = &self.config.ropes;
        let angles: Vec<_> =
            ropes.iter().map(|rope| Angles::new(&plan.positions, &rope.frequencies, &rope.scales)).collect();
        let add = AddScaled(self.config.residual_scale);
        let x = Tensor::from_vec(self.embed(&plan.tokens), (plan.tokens.len(), hidden_size), &Device::Cpu)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let output = self.attend(plan, sequences, index, &x, &angles)?;
            x.inplace_op2(&norm(layer.attention_post_norm.as_ref(), &output)?, &add)?;
            drop(output);
            let output = self.run_mlp(layer, &x)?;
            x.inplace_op2(&norm(layer.mlp_post_norm.as_ref(), &output)?, &add)?;
        }
        with_floats(&x, |x| Ok(self.outputs(plan, x)))
    }

    /// One layer's MLP. What it holds is let go of as soon as it can be: the allocator would give a heap that is large and
    /// empty between two layers back to the system, and take it again page by page.
    fn run_mlp(&self, layer: &Layer, x: &Tensor) -> Result<Tensor> {
        let normed = norm(layer.mlp_norm.as_ref(), x)?;
        let gate_up = layer.gate_up.forward(&normed)?;
        drop(normed);
        let inner = gate_up.apply_op1_no_bwd(&Gate { kernels: self.kernels, activation: self.config.activation })?;
        drop(gate_up);
        Ok(layer.down.forward(&inner)?)
    }

    /// One layer's attention.
    fn attend(
        &self,
        plan: &Plan,
        sequences: &mut [Sequence],
        index: usize,
        x: &Tensor,
        angles: &[Angles],
    ) -> Result<Tensor> {
        let (layer, config, shape) = (&self.layers[index], &self.config.layers[index], &self.shape);
        let qkv = layer.qkv.forward(&norm(layer.attention_norm.as_ref(), x)?)?;
        qkv.inplace_op1(&Prepare {
            kernels: self.kernels,
            heads: self.config.num_heads,
            kv_heads: shape.heads,
            head_dim: shape.head_dim,
            norms: layer.qk_norms.as_ref(),
            angles: config.rope.map(|rope| &angles[rope]),
            scale: self.config.attention_scale,
        })?;
        let (queries, keys) = (self.config.num_heads * shape.head_dim, shape.heads * shape.head_dim);
        with_floats(&qkv, |values| {
            for (sequence, rows) in sequences.iter_mut().zip(&plan.rows) {
                for row in rows.clone() {
                    let row_values = &values[row * (queries + 2 * keys)..][queries..queries + 2 * keys];
                    let (k, v) = row_values.split_at(keys);
                    sequence.write(shape, index, plan.positions[row], k, v)?;
                }
            }
            Ok(())
        })?;
        let attended = qkv.apply_op1_no_bwd(&Attention {
            kernels: self.kernels,
            shape,
            sequences,
            runs: &plan.runs,
            heads: self.config.num_heads,
            layer: index,
            window: config.window,
            soft_cap: self.config.attention_soft_cap,
        })?;
        drop(qkv);
        Ok(layer.attention_output.forward(&attended)?)
    }

    fn embed(&self, tokens: &[usize]) -> Vec<f32> {
        let (width, scale) = (self.config.hidden_size, self.config.embedding_scale);
        let embedding = self.ends.embedding.as_ref().unwrap_or_else(|| self.ends.head.first());
        let mut rows = vec![0.0; tokens.len() * width];
        rows.par_chunks_exact_mut(width).zip(tokens).with_min_len(16).for_each(|(row, &token)| {
            for (to, value) in row.iter_mut().zip(embedding.row(token)) {
                *to = value * scale;
            }
        });
        rows
    }

    /// The last norm of the wanted rows, and their logits.
    fn outputs(&self, plan: &Plan, x: &[f32]) -> Rows {
        let width = self.config.hidden_size;
        let mut wanted: Vec<f32> =
            plan.wanted.iter().flat_map(|&row| &x[row * width..(row + 1) * width]).copied().collect();
        self.ends.norm.in_place(&mut wanted);
        if plan.hidden {
            return Rows { values: wanted, width };
        }
        let mut values = self.ends.head.project(&wanted);
        let (scale, cap) = (self.config.logit_scale, self.config.logit_soft_cap);
        if scale != 1.0 || cap.is_some() {
            for_each_row(&mut values, self.config.vocab_size, |_, row| {
                for value in row.iter_mut() {
                    *value *= scale;
                }
                if let Some(cap) = cap {
                    self.kernels.cap(row, cap);
                }
            });
        }
        Rows { values, width: self.config.vocab_size }
    }
}

fn norm(norm: Option<&Norm>, rows: &Tensor) -> Result<Tensor> {
    Ok(match norm {
        Some(norm) => norm.forward(rows)?,
        None => rows.clone(),
    })
}

/// Makes threads to compute with.
///
/// # Errors
/// `Failed`: the system grants none.
pub fn thread_pool(threads: usize) -> Result<ThreadPool> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("candle-{index}"))
        .build()
        .map_err(|error| Error::Failed(format!("{threads} threads can't be made: {error}")))
}

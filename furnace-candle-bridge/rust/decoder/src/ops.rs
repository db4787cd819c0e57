//! What is done to the rows of a step between the projections, as custom ops of candle.

use candle_core::{CpuStorage, CustomOp1, InplaceOp1, InplaceOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use crate::kernels::{Activation, Kernels};
use crate::tensors::floats;

/// Numbers that are worth a task of their own.
const TASK_NUMBERS: usize = 1 << 14;

/// Calls `row(index, values)` for each row of `width` values, several at once where that pays.
pub(crate) fn for_each_row(values: &mut [f32], width: usize, row: impl Fn(usize, &mut [f32]) + Sync) {
    let least = TASK_NUMBERS.div_ceil(width);
    values.par_chunks_exact_mut(width).enumerate().with_min_len(least).for_each(|(index, values)| row(index, values));
}

/// RMS norm of rows, times a weight.
pub(crate) struct Norm {
    kernels: &'static Kernels,
    weight: Vec<f32>,
    eps: f32,
}

impl Norm {
    pub fn new(kernels: &'static Kernels, weight: Vec<f32>, eps: f32) -> Self {
        Norm { kernels, weight, eps }
    }

    /// Norms rows of the weight's length.
    pub fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        rows.apply_op1_no_bwd(self)
    }

    /// Norms parts of a row in place, each of the weight's length.
    pub fn in_place(&self, values: &mut [f32]) {
        let mut before = vec![0.0; self.weight.len()];
        for part in values.chunks_exact_mut(self.weight.len()) {
            before.copy_from_slice(part);
            self.kernels.rms_norm(&before, &self.weight, self.eps, part);
        }
    }
}

impl CustomOp1 for Norm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = layout.shape().dims2()?;
        if width != self.weight.len() {
            candle_core::bail!("rows of {width} values were given to a norm of {}", self.weight.len());
        }
        let x = floats(storage, layout)?;
        let mut out = vec![0.0; x.len()];
        for_each_row(&mut out, width, |row, out| {
            self.kernels.rms_norm(&x[row * width..(row + 1) * width], &self.weight, self.eps, out);
        });
        Ok((CpuStorage::F32(out), (rows, width).into()))
    }
}

/// The middle of an MLP: rows of gates and then as many others, to `activation(gate) * other`.
pub(crate) struct Gate {
    pub kernels: &'static Kernels,
    pub activation: Activation,
}

impl CustomOp1 for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, both) = layout.shape().dims2()?;
        let (x, width) = (floats(storage, layout)?, both / 2);
        let mut out = vec![0.0; rows * width];
        for_each_row(&mut out, width, |row, out| {
            let (gate, up) = x[row * both..(row + 1) * both].split_at(width);
            self.kernels.gated(self.activation, gate, up, out);
        });
        Ok((CpuStorage::F32(out), (rows, width).into()))
    }
}

/// `rows += scale * others`, in place. Candle's own sum runs on threads of its own, however many the operator granted.
pub(crate) struct AddScaled(pub f32);

impl InplaceOp2 for AddScaled {
    fn name(&self) -> &'static str {
        "add-scaled"
    }

    fn cpu_fwd(
        &self,
        rows: &mut CpuStorage,
        layout: &Layout,
        others: &CpuStorage,
        other_layout: &Layout,
    ) -> Result<()> {
        let others = floats(others, other_layout)?;
        let (CpuStorage::F32(values), Some((start, end))) = (rows, layout.contiguous_offsets()) else {
            candle_core::bail!("no rows of floats");
        };
        if end - start != others.len() {
            candle_core::bail!("{} values can't be added to {}", others.len(), end - start);
        }
        let (_, width) = layout.shape().dims2()?;
        for_each_row(&mut values[start..end], width, |row, values| {
            for (value, other) in values.iter_mut().zip(&others[row * width..]) {
                *value += self.0 * other;
            }
        });
        Ok(())
    }
}

/// Cosines and sines of a step's rows, [rows, half a head] each.
pub(crate) struct Angles {
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Angles {
    /// Computes them.
    ///
    /// `frequencies` are in radians a position, one for each pair; cosine and sine are multiplied by `scales`.
    pub fn new(positions: &[usize], frequencies: &[f32], scales: &[f32]) -> Self {
        let pairs = positions.iter().flat_map(|&position| {
            let turned = frequencies.iter().map(move |frequency| (position as f32 * frequency).sin_cos());
            turned.zip(scales).map(|((sine, cosine), scale)| (cosine * scale, sine * scale))
        });
        let (cosines, sines) = pairs.unzip();
        Angles { cosines, sines }
    }
}

/// What is done to queries and keys before they meet: norms, rotation, and the scale of the scores.
pub(crate) struct Prepare<'a> {
    pub kernels: &'static Kernels,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// For queries and for keys: of a head, or of all heads at once.
    pub norms: Option<&'a [Norm; 2]>,
    pub angles: Option<&'a Angles>,
    pub scale: f32,
}

impl InplaceOp1 for Prepare<'_> {
    fn name(&self) -> &'static str {
        "prepare-attention"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            candle_core::bail!("no rows of floats");
        };
        let (width, half) = (self.head_dim, self.head_dim / 2);
        let row_width = (self.heads + 2 * self.kv_heads) * width;
        for_each_row(&mut values[start..end], row_width, |row, values| {
            let (queries, rest) = values.split_at_mut(self.heads * width);
            let keys = &mut rest[..self.kv_heads * width];
            if let Some([query_norm, key_norm]) = self.norms {
                query_norm.in_place(queries);
                key_norm.in_place(keys);
            }
            if let Some(angles) = self.angles {
                let at = row * half..(row + 1) * half;
                for head in queries.chunks_exact_mut(width).chain(keys.chunks_exact_mut(width)) {
                    self.kernels.rotate(head, &angles.cosines[at.clone()], &angles.sines[at.clone()]);
                }
            }
            for query in queries {
                *query *= self.scale;
            }
        });
        Ok(())
    }
}

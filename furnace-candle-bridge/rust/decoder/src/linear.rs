//! Projections, as a custom op of candle.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use rayon::prelude::*;

use crate::error::{Result, invalid};
use crate::kernels::{Format, Kernels, Quantized};
use crate::packed::Packed;
use crate::tensors::{Disjoint, floats};

/// Rows that are multiplied with one panel at a time: enough to make unpacking cheap, few enough to stay in the cache.
const ROW_BLOCK: usize = 128;
/// Where there are few rows, panels that are worth a task.
const LEAST_PANELS: usize = 4;

thread_local! {
    /// A task's result and its unpacked weights.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// A projection of rows by several matrices with the same inputs, whose outputs follow each other.
pub struct Linear {
    kernels: &'static Kernels,
    parts: Vec<Packed>,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
    /// For each panel of all parts: the part, the panel in it, and the first column of its outputs.
    panels: Vec<(usize, usize, usize)>,
    /// Sizes of groups in which inputs become whole numbers.
    groups: BTreeSet<usize>,
}

impl Linear {
    /// Joins matrices.
    ///
    /// # Errors
    /// `Invalid`: there are none, their inputs differ, or the bias has another length than the outputs.
    pub fn new(kernels: &'static Kernels, parts: Vec<Packed>, bias: Option<Vec<f32>>) -> Result<Self> {
        let inputs = parts.first().map_or(0, Packed::inputs);
        if inputs == 0 || parts.iter().any(|part| part.inputs() != inputs) {
            return invalid("matrices of different inputs can't be joined".into());
        }
        let mut panels = Vec::new();
        let mut outputs = 0;
        for (place, part) in parts.iter().enumerate() {
            panels.extend((0..part.panels()).map(|panel| (place, panel, outputs + panel * kernels.width())));
            outputs += part.outputs();
        }
        if bias.as_ref().is_some_and(|bias| bias.len() != outputs) {
            return invalid(format!("a bias has not the length {outputs} of the outputs"));
        }
        let formats = parts.iter().map(Packed::format).filter(|format| format.is_whole());
        let groups = formats.map(Format::group).collect();
        Ok(Linear { kernels, parts, bias, inputs, outputs, panels, groups })
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// The weights of the first matrix.
    pub fn first(&self) -> &Packed {
        &self.parts[0]
    }

    /// Projects rows: [rows, inputs] to [rows, outputs].
    ///
    /// # Errors
    /// The tensor is not such rows.
    pub fn forward(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        rows.apply_op1_no_bwd(self)
    }

    /// Projects rows, on the current thread pool.
    ///
    /// # Panics
    /// `x` holds no whole rows.
    pub fn project(&self, x: &[f32]) -> Vec<f32> {
        assert_eq!(x.len() % self.inputs, 0, "rows are cut");
        let rows = x.len() / self.inputs;
        let mut out = vec![0.0; rows * self.outputs];
        let target = Disjoint::new(&mut out);
        let tasks = self.panels.len() * rows.div_ceil(ROW_BLOCK);
        let least = if rows < ROW_BLOCK / 4 { LEAST_PANELS } else { 1 };
        let quantized = self.quantize(x);
        (0..tasks).into_par_iter().with_min_len(least).for_each(|task| {
            let first = task / self.panels.len() * ROW_BLOCK;
            let last = rows.min(first + ROW_BLOCK);
            self.project_panel(x, &quantized, first..last, task % self.panels.len(), |row, column, values| {
                // SAFETY: no other task has this block of rows and this panel.
                unsafe { target.write(row * self.outputs + column, values) }
            });
        });
        out
    }

    /// The rows as whole numbers, once for each size of groups that a matrix has.
    fn quantize(&self, x: &[f32]) -> Vec<Quantized> {
        self.groups.iter().map(|&group| self.kernels.quantize(x, self.inputs, group)).collect()
    }

    /// Multiplies some rows with one panel, and hands each row of the result on, with its row and first column.
    fn project_panel(
        &self,
        x: &[f32],
        quantized: &[Quantized],
        rows: Range<usize>,
        index: usize,
        write: impl Fn(usize, usize, &[f32]),
    ) {
        let (part, panel, column) = self.panels[index];
        let (part, width) = (&self.parts[part], self.kernels.width());
        let outputs = width.min(part.outputs() - panel * width);
        SCRATCH.with_borrow_mut(|(out, unpacked)| {
            out.resize(rows.len() * width, 0.0);
            match quantized.iter().find(|quantized| quantized.fits(part.format())) {
                Some(x) => self.kernels.project_whole(x, rows.clone(), part.format(), part.panel(panel), out),
                None => {
                    let x = &x[rows.start * self.inputs..rows.end * self.inputs];
                    self.kernels.project(x, self.inputs, part.format(), part.panel(panel), out, unpacked);
                }
            }
            for (row, values) in rows.zip(out.chunks_exact_mut(width)) {
                let values = &mut values[..outputs];
                if let Some(bias) = &self.bias {
                    for (value, bias) in values.iter_mut().zip(&bias[column..]) {
                        *value += bias;
                    }
                }
                write(row, column, values);
            }
        });
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, width) = layout.shape().dims2()?;
        if width != self.inputs {
            candle_core::bail!("rows of {width} values were given to a projection of {}", self.inputs);
        }
        Ok((CpuStorage::F32(self.project(floats(storage, layout)?)), (rows, self.outputs).into()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::stored::StoredType;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|place| (((place + seed) * 7919 % 4001) as f32 - 2000.0) / 1500.0).collect()
    }

    fn quantized(outputs: usize, inputs: usize, dtype: GgmlDType) -> (Vec<u8>, Tensor) {
        let tensor = Tensor::from_vec(numbers(outputs * inputs, 0), (outputs, inputs), &Device::Cpu).unwrap();
        let quantized = QTensor::quantize(&tensor, dtype).unwrap();
        (quantized.data().unwrap().into_owned(), quantized.dequantize(&Device::Cpu).unwrap())
    }

    const TYPES: [(&str, GgmlDType); 11] = [
        ("F32", GgmlDType::F32),
        ("F16", GgmlDType::F16),
        ("BF16", GgmlDType::BF16),
        ("Q4_0", GgmlDType::Q4_0),
        ("Q4_1", GgmlDType::Q4_1),
        ("Q5_0", GgmlDType::Q5_0),
        ("Q5_1", GgmlDType::Q5_1),
        ("Q8_0", GgmlDType::Q8_0),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
    ];

    #[test]
    fn products_of_every_type_and_width_equal_those_of_candle_and_are_bitwise_those_of_single_rows() {
        let inputs = 512;
        for kernels in Kernels::available() {
            for (name, dtype) in TYPES {
                let stored = StoredType::named(name).unwrap();
                let (bytes, weights) = quantized(70, inputs, dtype);
                let (more_bytes, more_weights) = quantized(33, inputs, GgmlDType::Q8_0);
                let parts = vec![
                    Packed::new(kernels, stored, 70, inputs, &bytes).unwrap(),
                    Packed::new(kernels, StoredType::Q8_0, 33, inputs, &more_bytes).unwrap(),
                ];
                let bias = numbers(103, 5);
                let linear = Linear::new(kernels, parts, Some(bias.clone())).unwrap();
                let all = numbers(141 * inputs, 3);
                let x = Tensor::from_vec(all.clone(), (141, inputs), &Device::Cpu).unwrap();
                let weights = Tensor::cat(&[weights, more_weights], 0).unwrap();
                let bias = Tensor::from_vec(bias, 103, &Device::Cpu).unwrap();
                let expected = x.matmul(&weights.t().unwrap()).unwrap().broadcast_add(&bias).unwrap();
                let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
                let whole = linear.project(&all);
                for (value, expected) in whole.iter().zip(&expected) {
                    assert!((value - expected).abs() < 2e-3, "{name} on {}: {value} {expected}", kernels.name());
                }
                for rows in [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 127, 128, 129] {
                    assert_eq!(linear.project(&all[..rows * inputs]), whole[..rows * 103], "{name}, {rows} rows");
                }
            }
        }
    }

    #[test]
    fn processors_with_fused_sums_agree_bit_for_bit() {
        let (bytes, _) = quantized(64, 256, GgmlDType::Q4_1);
        let x = numbers(9 * 256, 1);
        let of_floats = |kernels: &&Kernels| ["avx512", "avx2"].contains(&kernels.name());
        let mut results = Kernels::available().iter().filter(of_floats).map(|kernels| {
            let packed = Packed::new(kernels, StoredType::Q4_1, 64, 256, &bytes).unwrap();
            Linear::new(kernels, vec![packed], None).unwrap().project(&x)
        });
        if let Some(first) = results.next() {
            assert!(results.all(|result| result == first));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let kernels = &Kernels::available()[0];
        let packed = |inputs| Packed::new(kernels, StoredType::F32, 2, inputs, &vec![0; 8 * inputs]).unwrap();
        assert!(Linear::new(kernels, vec![], None).is_err());
        assert!(Linear::new(kernels, vec![packed(4), packed(6)], None).is_err());
        assert!(Linear::new(kernels, vec![packed(4)], Some(vec![0.0; 3])).is_err());
        let linear = Linear::new(kernels, vec![packed(4)], None).unwrap();
        assert!(linear.forward(&Tensor::zeros((2, 5), candle_core::DType::F32, &Device::Cpu).unwrap()).is_err());
    }
}

//! A matrix of weights, packed into panels.

use rayon::prelude::*;

use crate::aligned::Aligned;
use crate::error::{Result, invalid};
use crate::kernels::{Format, Kernels};
use crate::stored::{Block, StoredType};

/// Weights [outputs, inputs] in panels of `kernels.width()` outputs; see `kernels::format`.
pub struct Packed {
    format: Format,
    outputs: usize,
    inputs: usize,
    width: usize,
    panel_bytes: usize,
    data: Aligned,
}

impl Packed {
    /// Packs a matrix, on the current thread pool.
    ///
    /// `rows` are the stored bytes of all rows of inputs, one after the other.
    ///
    /// # Errors
    /// `Invalid`: the bytes are not those of such a matrix. `OutOfMemory`.
    pub fn new(kernels: &Kernels, stored: StoredType, outputs: usize, inputs: usize, rows: &[u8]) -> Result<Self> {
        let (format, width) = (kernels.format(stored.format()), kernels.width());
        let step = stored.block_size().max(format.group());
        if inputs == 0 || !inputs.is_multiple_of(step) {
            return invalid(format!("a row of {inputs} inputs is not a multiple of {step}, as {stored:?} needs"));
        }
        let row_bytes = inputs / stored.block_size() * stored.block_bytes();
        if outputs == 0 || row_bytes.checked_mul(outputs) != Some(rows.len()) {
            return invalid(format!(
                "{} bytes are not the weights of {outputs} x {inputs} as {stored:?}, which has {row_bytes} bytes a row",
                rows.len()
            ));
        }
        let panel_bytes = inputs / format.group() * format.group_bytes(width);
        // `rows` is in memory, and a panel is at most four times its size, or one row where there are few.
        let mut data = Aligned::zeroed(outputs.div_ceil(width) * panel_bytes)?;
        data.bytes_mut().par_chunks_mut(panel_bytes).enumerate().for_each(|(index, panel)| {
            for (lane, row) in rows.chunks_exact(row_bytes).skip(index * width).take(width).enumerate() {
                pack_row(stored, format, row, panel, width, lane);
            }
        });
        Ok(Packed { format, outputs, inputs, width, panel_bytes, data })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// How many panels there are; the last one may have fewer outputs than `width`.
    pub fn panels(&self) -> usize {
        self.outputs.div_ceil(self.width)
    }

    /// The bytes of a panel.
    pub fn panel(&self, index: usize) -> &[u8] {
        &self.data.bytes()[index * self.panel_bytes..(index + 1) * self.panel_bytes]
    }

    /// The weights of one output, as floats.
    ///
    /// # Panics
    /// There is no such output.
    pub fn row(&self, output: usize) -> Vec<f32> {
        assert!(output < self.outputs, "no such row");
        let (panel, lane, width) = (self.panel(output / self.width), output % self.width, self.width);
        let (group, header) = (self.format.group(), self.format.header_bytes(width));
        let float = |at: usize| f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]]);
        let is_nibble = self.format.pair_bytes() == 1;
        let mut weights = Vec::with_capacity(self.inputs);
        for start in (0..panel.len()).step_by(self.format.group_bytes(width)) {
            for input in 0..group {
                // Where floats are stored, those of all outputs lie side by side.
                let place = input * width + lane;
                let at = start + header;
                let quant = match self.format {
                    Format::F32 => float(at + 4 * place),
                    Format::F16 => half::f16::from_bits(bits(panel, at + 2 * place)).to_f32(),
                    Format::BF16 => half::bf16::from_bits(bits(panel, at + 2 * place)).to_f32(),
                    scaled => {
                        let (byte, shift, added) = scaled.place(width, input, lane);
                        let quant = panel[at + byte].wrapping_sub(added) as i8;
                        f32::from(if is_nibble { quant >> shift & 15 } else { quant })
                    }
                };
                weights.push(if self.format.is_scaled() {
                    quant.mul_add(float(start + 4 * lane), float(start + 4 * (width + lane)))
                } else {
                    quant
                });
            }
        }
        weights
    }
}

fn bits(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Writes one row into a lane of a panel.
fn pack_row(stored: StoredType, format: Format, row: &[u8], panel: &mut [u8], width: usize, lane: usize) {
    let size = stored.block_bytes();
    if !format.is_scaled() {
        for (input, element) in row.chunks_exact(size).enumerate() {
            let at = (input * width + lane) * size;
            panel[at..at + size].copy_from_slice(element);
        }
        return;
    }
    let (group, header, group_bytes) = (format.group(), format.header_bytes(width), format.group_bytes(width));
    let mut block = Block::new();
    let groups = stored.block_size() / group;
    for (index, bytes) in row.chunks_exact(size).enumerate() {
        block.read(stored, bytes);
        for place in 0..groups {
            let to = &mut panel[(index * groups + place) * group_bytes..][..group_bytes];
            to[4 * lane..][..4].copy_from_slice(&block.scales[place].to_le_bytes());
            to[4 * (width + lane)..][..4].copy_from_slice(&block.offsets[place].to_le_bytes());
            for (input, &quant) in block.quants[place * group..(place + 1) * group].iter().enumerate() {
                let (at, shift, added) = format.place(width, input, lane);
                to[header + at] |= (quant as u8).wrapping_add(added) << shift;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};

    use super::*;

    /// A matrix in each quantized type that candle can make, as bytes, and the numbers that candle reads from them.
    pub(crate) fn quantized(outputs: usize, inputs: usize) -> Vec<(StoredType, Vec<u8>, Vec<f32>)> {
        let values: Vec<f32> =
            (0..outputs * inputs).map(|place| ((place * 7919 % 4001) as f32 - 1900.0) / 700.0).collect();
        let tensor = Tensor::from_vec(values, (outputs, inputs), &Device::Cpu).unwrap();
        let types = [
            (StoredType::F32, GgmlDType::F32),
            (StoredType::F16, GgmlDType::F16),
            (StoredType::BF16, GgmlDType::BF16),
            (StoredType::Q4_0, GgmlDType::Q4_0),
            (StoredType::Q4_1, GgmlDType::Q4_1),
            (StoredType::Q5_0, GgmlDType::Q5_0),
            (StoredType::Q5_1, GgmlDType::Q5_1),
            (StoredType::Q8_0, GgmlDType::Q8_0),
            (StoredType::Q4K, GgmlDType::Q4K),
            (StoredType::Q5K, GgmlDType::Q5K),
            (StoredType::Q6K, GgmlDType::Q6K),
        ];
        types
            .map(|(stored, dtype)| {
                let quantized = QTensor::quantize(&tensor, dtype).unwrap();
                let read = quantized.dequantize(&Device::Cpu).unwrap();
                let floats = read.flatten_all().unwrap().to_vec1().unwrap();
                (stored, quantized.data().unwrap().into_owned(), floats)
            })
            .into()
    }

    #[test]
    fn rows_of_every_type_are_what_candle_reads() {
        for kernels in Kernels::available() {
            for (stored, bytes, expected) in quantized(37, 512) {
                let packed = Packed::new(kernels, stored, 37, 512, &bytes).unwrap();
                for (output, expected) in expected.chunks_exact(512).enumerate() {
                    for (weight, expected) in packed.row(output).iter().zip(expected) {
                        assert!((weight - expected).abs() <= 1e-6, "{stored:?}: {weight} {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_that_are_not_those_of_the_matrix_are_refused() {
        let kernels = &Kernels::available()[0];
        for (outputs, inputs, bytes) in [(2, 64, 71), (2, 33, 72), (0, 64, 0), (2, 0, 0), (usize::MAX, 64, 72)] {
            assert!(Packed::new(kernels, StoredType::Q8_0, outputs, inputs, &vec![0; bytes]).is_err());
        }
        assert!(Packed::new(kernels, StoredType::F32, 2, 3, &[0; 24]).is_err());
    }
}

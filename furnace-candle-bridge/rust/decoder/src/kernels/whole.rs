//! Products in whole numbers, of weights of four or eight bits and inputs of sixteen.
//!
//! The inputs of a group share a scale. Each is `256 * high + low`, two signed bytes, as processors multiply bytes. The
//! sum of a group is exact, and groups are added in order, so a row's result does not depend on others beside it.

use std::ops::Range;

use rayon::prelude::*;

use super::{Format, Kernels};

/// The largest whole number that an input becomes.
const STEPS: f32 = 127.0 * 256.0;
/// Where all of a group are closer to 0, they are 0.
const TINIEST: f32 = 1e-30;
/// Added to a float below 2^22, it leaves the nearest whole number in the lowest bits.
const ROUNDING: f32 = 12_582_912.0;
/// What is added to signed weights of eight bits, as the processor wants unsigned ones.
const ADDED: i32 = 128;
/// Inputs that are worth a task of their own.
const TASK_INPUTS: usize = 1 << 14;

/// The kernels for one set of instructions.
#[derive(Clone, Copy)]
pub(super) struct Whole {
    pub quantize: unsafe fn(&[f32], &mut [u8]),
    pub project: unsafe fn(Format, &Projection),
}

/// The product of rows with a panel; `out` is [rows, two vectors].
pub(super) struct Projection {
    /// The first group of the first row; the same group of other rows follows.
    pub x: *const u8,
    /// Bytes between two groups of a row.
    pub x_stride: usize,
    pub rows: usize,
    pub groups: usize,
    pub panel: *const u8,
    pub out: *mut f32,
}

/// Bytes that a group of a row becomes: the high ones, the low ones, the scale, the sum times the scale, and the sum
/// times `-ADDED`.
pub(super) const fn group_bytes(group: usize) -> usize {
    2 * group + 12
}

/// Turns a group of a row into whole numbers. A number that is not finite makes the scale not finite either.
#[inline(always)]
pub(super) fn quantize(values: &[f32], out: &mut [u8]) {
    let largest = f32::from_bits(values.iter().map(|value| value.abs().to_bits()).fold(0, u32::max));
    let scale = largest / STEPS;
    let inverse = if largest > TINIEST { STEPS / largest } else { 0.0 };
    let (high, rest) = out.split_at_mut(values.len());
    let (low, rest) = rest.split_at_mut(values.len());
    let mut sum = 0_i32;
    for ((&value, high), low) in values.iter().zip(high).zip(low) {
        let whole = (value * inverse + ROUNDING).to_bits().wrapping_sub(ROUNDING.to_bits()) as i32;
        *high = (whole.wrapping_add(128) >> 8) as u8;
        *low = whole as u8;
        sum = sum.wrapping_add(whole);
    }
    rest[..4].copy_from_slice(&scale.to_ne_bytes());
    rest[4..8].copy_from_slice(&(scale * sum as f32).to_ne_bytes());
    rest[8..12].copy_from_slice(&sum.wrapping_mul(-ADDED).to_ne_bytes());
}

/// Rows of inputs as whole numbers, [groups, rows].
pub struct Quantized {
    rows: usize,
    group: usize,
    groups: usize,
    data: Vec<u8>,
}

impl Quantized {
    /// Whether weights of a format can be multiplied with them.
    pub fn fits(&self, format: Format) -> bool {
        format.is_whole() && format.group() == self.group
    }
}

impl Kernels {
    /// Turns rows into whole numbers, on the current thread pool.
    ///
    /// # Panics
    /// These kernels have no products in whole numbers, or a group is cut.
    pub fn quantize(&self, x: &[f32], inputs: usize, group: usize) -> Quantized {
        let whole = self.whole.expect("kernels for whole numbers");
        assert!(inputs.is_multiple_of(group), "a group is cut");
        let (rows, groups, bytes) = (x.len() / inputs, inputs / group, group_bytes(group));
        let mut data = vec![0; rows * groups * bytes];
        let least = TASK_INPUTS.div_ceil(rows.max(1) * group);
        data.par_chunks_mut((rows * bytes).max(1)).enumerate().with_min_len(least).for_each(|(index, of_rows)| {
            for (row, out) in of_rows.chunks_exact_mut(bytes).enumerate() {
                // SAFETY: only kernels that the processor can run are made.
                unsafe { (whole.quantize)(&x[row * inputs + index * group..][..group], out) }
            }
        });
        Quantized { rows, group, groups, data }
    }

    /// Multiplies some of the rows with a panel, into [rows, width].
    ///
    /// # Panics
    /// These kernels have no products in whole numbers, a slice is too short, or the format has other groups.
    pub fn project_whole(&self, x: &Quantized, rows: Range<usize>, format: Format, panel: &[u8], out: &mut [f32]) {
        let whole = self.whole.expect("kernels for whole numbers");
        assert!(x.fits(format), "another format");
        assert!(rows.start <= rows.end && rows.end <= x.rows, "too few inputs");
        assert!(out.len() >= rows.len() * self.width, "too little room");
        assert!(panel.len() >= x.groups * format.group_bytes(self.width), "too small a panel");
        let bytes = group_bytes(x.group);
        let job = Projection {
            x: x.data[rows.start * bytes..].as_ptr(),
            x_stride: x.rows * bytes,
            rows: rows.len(),
            groups: x.groups,
            panel: panel.as_ptr(),
            out: out.as_mut_ptr(),
        };
        // SAFETY: the slices are long enough, and only kernels that the processor can run are made.
        unsafe { (whole.project)(format, &job) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_kept_to_sixteen_bits_and_what_is_not_finite_is_not_hidden() {
        let values: Vec<f32> = (0..32).map(|place| ((place * 7919 % 4001) as f32 - 2000.0) / 700.0).collect();
        let largest = values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
        let mut out = [0; group_bytes(32)];
        quantize(&values, &mut out);
        let float = |out: &[u8], at: usize| f32::from_ne_bytes(out[at..at + 4].try_into().unwrap());
        for (place, value) in values.iter().enumerate() {
            let whole = 256 * i32::from(out[place] as i8) + i32::from(out[32 + place] as i8);
            assert!((whole as f32 * float(&out, 64) - value).abs() <= largest * 2e-5);
        }
        assert!((float(&out, 68) - values.iter().sum::<f32>()).abs() < 1e-3);
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            let mut values = values.clone();
            values[5] = wrong;
            quantize(&values, &mut out);
            assert!(!float(&out, 64).is_finite());
        }
        for small in [0.0, 1e-40] {
            quantize(&[small; 32], &mut out);
            assert_eq!(out[..64], [0; 64]);
            assert!(float(&out, 64) < 1e-40);
        }
    }
}

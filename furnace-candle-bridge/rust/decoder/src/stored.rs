//! Weights as files store them, and the numbers in their blocks.
//!
//! Sizes and layouts are those of ggml's block structs (src/ggml-common.h of ggml).

use half::f16;

use crate::error::{Result, invalid};
use crate::kernels::Format;

/// The types that are computed with as they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

const TYPES: [(StoredType, &str, usize, usize, Format); 11] = [
    (StoredType::F32, "F32", 1, 4, Format::F32),
    (StoredType::F16, "F16", 1, 2, Format::F16),
    (StoredType::BF16, "BF16", 1, 2, Format::BF16),
    (StoredType::Q4_0, "Q4_0", 32, 18, Format::U4),
    (StoredType::Q4_1, "Q4_1", 32, 20, Format::U4),
    (StoredType::Q5_0, "Q5_0", 32, 22, Format::I8By32),
    (StoredType::Q5_1, "Q5_1", 32, 24, Format::I8By32),
    (StoredType::Q8_0, "Q8_0", 32, 34, Format::I8By32),
    (StoredType::Q4K, "Q4_K", 256, 144, Format::U4),
    (StoredType::Q5K, "Q5_K", 256, 176, Format::I8By32),
    (StoredType::Q6K, "Q6_K", 256, 210, Format::I8By16),
];

impl StoredType {
    /// The type of a name, as ggml and safetensors have it.
    ///
    /// # Errors
    /// `Invalid` for types that are not computed with here; they can be given as F32.
    pub fn named(name: &str) -> Result<Self> {
        match TYPES.iter().find(|entry| entry.1 == name) {
            Some(entry) => Ok(entry.0),
            None => invalid(format!("the type {name:.32} is not one of {}", Self::names().join(", "))),
        }
    }

    /// The names of all types.
    pub fn names() -> Vec<&'static str> {
        TYPES.iter().map(|entry| entry.1).collect()
    }

    fn entry(self) -> &'static (StoredType, &'static str, usize, usize, Format) {
        // The table has them in the order of the enum, as a test says.
        &TYPES[self as usize]
    }

    /// Elements in a block.
    pub fn block_size(self) -> usize {
        self.entry().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.entry().3
    }

    /// How panels hold it.
    pub fn format(self) -> Format {
        self.entry().4
    }
}

/// A block of a quantized type: `quants[i] * scales[i / group] + offsets[i / group]`, the group being the format's.
pub(crate) struct Block {
    pub quants: [i8; 256],
    pub scales: [f32; 16],
    pub offsets: [f32; 16],
}

impl Block {
    pub fn new() -> Self {
        Block { quants: [0; 256], scales: [0.0; 16], offsets: [0.0; 16] }
    }

    /// Reads the block of a quantized type; `bytes` are those of one block.
    pub fn read(&mut self, stored: StoredType, bytes: &[u8]) {
        match stored {
            StoredType::Q4_0 => {
                self.nibbles(&bytes[2..18]);
                self.scale(half(bytes, 0), -8.0 * half(bytes, 0));
            }
            StoredType::Q4_1 => {
                self.nibbles(&bytes[4..20]);
                self.scale(half(bytes, 0), half(bytes, 2));
            }
            StoredType::Q5_0 => {
                self.nibbles(&bytes[6..22]);
                self.fifth_bits(&bytes[2..6]);
                self.scale(half(bytes, 0), -16.0 * half(bytes, 0));
            }
            StoredType::Q5_1 => {
                self.nibbles(&bytes[8..24]);
                self.fifth_bits(&bytes[4..8]);
                self.scale(half(bytes, 0), half(bytes, 2));
            }
            StoredType::Q8_0 => {
                for (quant, &byte) in self.quants.iter_mut().zip(&bytes[2..34]) {
                    *quant = byte as i8;
                }
                self.scale(half(bytes, 0), 0.0);
            }
            StoredType::Q4K => {
                self.groups_of_nibbles(&bytes[16..144]);
                self.scales_of_groups(bytes);
            }
            StoredType::Q5K => {
                self.groups_of_nibbles(&bytes[48..176]);
                for (place, quant) in self.quants.iter_mut().enumerate() {
                    *quant |= ((bytes[16 + place % 32] >> (place / 32) & 1) << 4) as i8;
                }
                self.scales_of_groups(bytes);
            }
            StoredType::Q6K => self.read_q6k(bytes),
            StoredType::F32 | StoredType::F16 | StoredType::BF16 => {}
        }
    }

    fn scale(&mut self, scale: f32, offset: f32) {
        self.scales[0] = scale;
        self.offsets[0] = offset;
    }

    /// The low halves of 16 bytes, and then the high ones.
    fn nibbles(&mut self, bytes: &[u8]) {
        for (place, &byte) in bytes.iter().enumerate() {
            self.quants[place] = (byte & 15) as i8;
            self.quants[place + 16] = (byte >> 4) as i8;
        }
    }

    fn fifth_bits(&mut self, bytes: &[u8]) {
        for place in 0..32 {
            self.quants[place] |= ((bytes[place / 8] >> (place % 8) & 1) << 4) as i8;
        }
    }

    /// Four runs of 32 bytes; each holds two groups of 32 elements, in its low and in its high halves.
    fn groups_of_nibbles(&mut self, bytes: &[u8]) {
        for (run, bytes) in bytes.chunks_exact(32).enumerate() {
            for (place, &byte) in bytes.iter().enumerate() {
                self.quants[64 * run + place] = (byte & 15) as i8;
                self.quants[64 * run + 32 + place] = (byte >> 4) as i8;
            }
        }
    }

    /// Eight scales and eight minimums of 6 bits in the 12 bytes behind two halves that they are multiplied by.
    fn scales_of_groups(&mut self, bytes: &[u8]) {
        let (scale, minimum, packed) = (half(bytes, 0), half(bytes, 2), &bytes[4..16]);
        for group in 0..4 {
            let (low, middle, high) = (packed[group], packed[group + 4], packed[group + 8]);
            self.scales[group] = scale * f32::from(low & 63);
            self.offsets[group] = -(minimum * f32::from(middle & 63));
            self.scales[group + 4] = scale * f32::from(high & 15 | low >> 2 & 48);
            self.offsets[group + 4] = -(minimum * f32::from(high >> 4 | middle >> 2 & 48));
        }
    }

    /// Two halves of 128 elements: 64 bytes of low nibbles, and 32 bytes with the two upper bits of four elements each.
    fn read_q6k(&mut self, bytes: &[u8]) {
        for (place, quant) in self.quants.iter_mut().enumerate() {
            let (side, run, column) = (place / 128, place % 128 / 32, place % 32);
            let low = bytes[64 * side + 32 * (run % 2) + column] >> (4 * (run / 2)) & 15;
            let high = bytes[128 + 32 * side + column] >> (2 * run) & 3;
            *quant = (low | high << 4) as i8 - 32;
        }
        let scale = half(bytes, 208);
        for (group, &byte) in bytes[192..208].iter().enumerate() {
            self.scales[group] = scale * f32::from(byte as i8);
            self.offsets[group] = 0.0;
        }
    }
}

fn half(bytes: &[u8], start: usize) -> f32 {
    f16::from_le_bytes([bytes[start], bytes[start + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_types_in_order() {
        for (place, entry) in TYPES.iter().enumerate() {
            assert_eq!(entry.0 as usize, place);
            assert_eq!(StoredType::named(entry.1).unwrap(), entry.0);
            assert_eq!(entry.2 % entry.4.group().min(entry.2), 0);
        }
        assert!(StoredType::named("IQ1_S").is_err());
    }
}

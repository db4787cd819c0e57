//! How weights lie in a panel.
//!
//! A panel holds the weights of `width` outputs, `width` being two vectors. Inputs follow each other in pairs; of each
//! the weights of all outputs lie side by side, so that a vector holds one input of many outputs, and a sum over inputs
//! never crosses lanes. Weights with scales come in groups of inputs: before a group are its scales and then its
//! offsets, a float for each output, and a weight is `quant * scale + offset`. For products in whole numbers, a
//! group's inputs lie in another order.

use super::isa::Isa;

/// How the weights of a panel are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F32,
    F16,
    BF16,
    /// Four bits, unsigned; a scale and an offset for 32 inputs.
    U4,
    /// Eight bits, signed; a scale and an offset for 16 inputs.
    I8By16,
    /// Eight bits, signed; a scale and an offset for 32 inputs.
    I8By32,
    /// As `U4`, for products in whole numbers: of each output four inputs lie side by side, and those of one vector of
    /// outputs behind those of the other. A byte holds two inputs, the second of which is four further.
    U4Quads,
    /// As `I8By16`, in the same order, with 128 added.
    U8By16Quads,
    /// As `I8By32`, in the same order, with 128 added.
    U8By32Quads,
}

impl Format {
    /// Inputs that share a scale, or 2 where there is none; a matrix has a multiple of them.
    pub fn group(self) -> usize {
        match self {
            Format::F32 => F32::GROUP,
            Format::F16 => F16::GROUP,
            Format::BF16 => BF16::GROUP,
            Format::U4 | Format::U4Quads => U4::GROUP,
            Format::I8By16 | Format::U8By16Quads => I8::<16>::GROUP,
            Format::I8By32 | Format::U8By32Quads => I8::<32>::GROUP,
        }
    }

    /// Bytes of a pair of inputs of one output, without scales.
    pub(crate) fn pair_bytes(self) -> usize {
        match self {
            Format::F32 => F32::PAIR_BYTES,
            Format::F16 => F16::PAIR_BYTES,
            Format::BF16 => BF16::PAIR_BYTES,
            Format::U4 | Format::U4Quads => U4::PAIR_BYTES,
            Format::I8By16 | Format::I8By32 | Format::U8By16Quads | Format::U8By32Quads => I8::<32>::PAIR_BYTES,
        }
    }

    /// Whether there are scales and offsets.
    pub(crate) fn is_scaled(self) -> bool {
        !matches!(self, Format::F32 | Format::F16 | Format::BF16)
    }

    /// Whether products are those of whole numbers.
    pub(crate) fn is_whole(self) -> bool {
        self.whole() == self && self.is_scaled()
    }

    /// The format for products in whole numbers, if there is one.
    pub(crate) fn whole(self) -> Self {
        match self {
            Format::U4 => Format::U4Quads,
            Format::I8By16 => Format::U8By16Quads,
            Format::I8By32 => Format::U8By32Quads,
            other => other,
        }
    }

    /// Where the quant of an input and an output lies behind a group's scales: the byte, by how many bits it is shifted,
    /// and what is added to it.
    pub(crate) fn place(self, width: usize, input: usize, output: usize) -> (usize, usize, u8) {
        let lanes = width / 2;
        // Of a run of quads for each vector of outputs.
        let quad = |run: usize, index: usize| ((output / lanes * run + index) * lanes + output % lanes) * 4 + input % 4;
        match self {
            Format::U4 => (input / 2 * width + output, 4 * (input % 2), 0),
            Format::U4Quads => (quad(self.group() / 8, input / 8), input & 4, 0),
            Format::U8By16Quads | Format::U8By32Quads => (quad(self.group() / 4, input / 4), 0, 128),
            _ => (input * width + output, 0, 0),
        }
    }

    /// Bytes of the scales and offsets of a group of a panel.
    pub(crate) fn header_bytes(self, width: usize) -> usize {
        if self.is_scaled() { 2 * size_of::<f32>() * width } else { 0 }
    }

    /// Bytes of a group of a panel.
    pub(crate) fn group_bytes(self, width: usize) -> usize {
        self.header_bytes(width) + self.group() / 2 * self.pair_bytes() * width
    }
}

/// A format as a type, so that each has kernels of its own.
///
/// # Safety
/// `pair` reads `PAIR_BYTES * 2 * I::LANES` bytes, on a processor that has `I`.
pub(super) trait Stored {
    const GROUP: usize;
    const PAIR_BYTES: usize;
    const SCALED: bool = false;

    /// Two inputs of the outputs of one of the two vectors of a panel.
    unsafe fn pair<I: Isa>(from: *const u8, vector: usize) -> (I::Vector, I::Vector);
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;
pub(super) struct U4;
pub(super) struct I8<const GROUP: usize>;

// SAFETY, of every block in these: both inputs, and both vectors, lie within what the caller vouches for.
impl Stored for F32 {
    const GROUP: usize = 2;
    const PAIR_BYTES: usize = 8;

    #[inline(always)]
    unsafe fn pair<I: Isa>(from: *const u8, vector: usize) -> (I::Vector, I::Vector) {
        let start = 4 * vector * I::LANES;
        unsafe { (I::load(from.add(start).cast()), I::load(from.add(start + 8 * I::LANES).cast())) }
    }
}

impl Stored for F16 {
    const GROUP: usize = 2;
    const PAIR_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn pair<I: Isa>(from: *const u8, vector: usize) -> (I::Vector, I::Vector) {
        let start = 2 * vector * I::LANES;
        unsafe { (I::load_f16(from.add(start)), I::load_f16(from.add(start + 4 * I::LANES))) }
    }
}

impl Stored for BF16 {
    const GROUP: usize = 2;
    const PAIR_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn pair<I: Isa>(from: *const u8, vector: usize) -> (I::Vector, I::Vector) {
        let start = 2 * vector * I::LANES;
        unsafe { (I::load_bf16(from.add(start)), I::load_bf16(from.add(start + 4 * I::LANES))) }
    }
}

impl Stored for U4 {
    const GROUP: usize = 32;
    const PAIR_BYTES: usize = 1;
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn pair<I: Isa>(from: *const u8, vector: usize) -> (I::Vector, I::Vector) {
        unsafe { I::load_u4(from.add(vector * I::LANES)) }
    }
}

impl<const GROUP: usize> Stored for I8<GROUP> {
    const GROUP: usize = GROUP;
    const PAIR_BYTES: usize = 2;
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn pair<I: Isa>(from: *const u8, vector: usize) -> (I::Vector, I::Vector) {
        let start = vector * I::LANES;
        unsafe { (I::load_i8(from.add(start)), I::load_i8(from.add(start + 2 * I::LANES))) }
    }
}

//! What the kernels need of a processor: vectors of floats, and ways to make them from stored weights.

/// A set of instructions. All functions are inlined into functions that have the instructions switched on.
///
/// # Safety
/// The functions may only be called on a processor that has the instructions. Pointers must be good for `LANES`
/// elements; they need no alignment.
pub(super) trait Isa {
    /// Floats, one for each lane.
    type Vector: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Rows that a tile of two vectors keeps in registers.
    const TILE_ROWS: usize;
    /// Most rows for which weights are unpacked on their way into the product, where the registers are enough for both;
    /// for more, they are unpacked before it. At most 8.
    const NARROW_ROWS: usize;

    unsafe fn splat(value: f32) -> Self::Vector;
    unsafe fn load(from: *const f32) -> Self::Vector;
    unsafe fn store(to: *mut f32, value: Self::Vector);
    /// `a * b + c`, rounded once where the processor can.
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The low and the high halves of bytes.
    unsafe fn load_u4(from: *const u8) -> (Self::Vector, Self::Vector);
    unsafe fn load_i8(from: *const u8) -> Self::Vector;
    unsafe fn load_f16(from: *const u8) -> Self::Vector;
    unsafe fn load_bf16(from: *const u8) -> Self::Vector;

    /// Asks for what will soon be read; the pointer may point anywhere.
    #[inline(always)]
    unsafe fn prefetch(_from: *const u8) {}
}

/// What every processor has.
pub(super) struct Portable;

const PORTABLE_LANES: usize = 8;

impl Isa for Portable {
    type Vector = [f32; PORTABLE_LANES];
    const LANES: usize = PORTABLE_LANES;
    const TILE_ROWS: usize = 4;
    const NARROW_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Vector {
        [value; PORTABLE_LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<Self::Vector>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Vector) {
        // SAFETY: the caller vouches for the pointer.
        unsafe { to.cast::<Self::Vector>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
        } else {
            // Without the instruction, rounding once takes a call for each number.
            std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
        }
    }

    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (Self::Vector, Self::Vector) {
        // SAFETY: the caller vouches for the pointer.
        let bytes = unsafe { from.cast::<[u8; PORTABLE_LANES]>().read_unaligned() };
        (bytes.map(|byte| f32::from(byte & 15)), bytes.map(|byte| f32::from(byte >> 4)))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<[i8; PORTABLE_LANES]>().read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<[u16; PORTABLE_LANES]>().read_unaligned() }.map(|bits| half::f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<[u16; PORTABLE_LANES]>().read_unaligned() }
            .map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
}

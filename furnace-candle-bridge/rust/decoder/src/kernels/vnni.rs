//! Products in whole numbers, on AVX-512 with VNNI: four inputs of 16 outputs at once.

use std::arch::x86_64::*;

use super::format::Format;
use super::whole::{self, Projection, Whole, group_bytes};

/// Outputs of a vector.
const LANES: usize = 16;
/// Bytes of the scales and offsets before a group.
const HEADER: usize = 16 * LANES;
/// Bytes between what is multiplied and what is asked for from memory.
const AHEAD: usize = 4096;
/// Most rows that wait for memory all the time: there the processor looks ahead better by itself.
const WAITING_ROWS: usize = 4;

impl Whole {
    /// For processors that have AVX-512 F, VL, BW and VNNI.
    pub(super) const VNNI: Whole = Whole { quantize, project };
}

#[target_feature(enable = "avx512f,avx512vl,avx512bw")]
unsafe fn quantize(values: &[f32], out: &mut [u8]) {
    match values.len() {
        // So that the compiler knows how many they are.
        32 => whole::quantize(&values[..32], out),
        _ => whole::quantize(values, out),
    }
}

#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512vnni")]
unsafe fn project(format: Format, job: &Projection) {
    // SAFETY: the caller vouches for the job, and by calling this for the processor.
    unsafe {
        match format {
            Format::U4Quads => multiply::<8, true>(job),
            Format::U8By16Quads => multiply::<4, false>(job),
            Format::U8By32Quads => multiply::<8, false>(job),
            _ => unreachable!("floats have kernels of their own"),
        }
    }
}

/// Weights of four bits if `NIBBLES`, otherwise of eight, in groups of `QUADS` times four inputs.
///
/// # Safety
/// The processor has the instructions; pointers are good for the sizes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512vnni")]
unsafe fn multiply<const QUADS: usize, const NIBBLES: bool>(job: &Projection) {
    let row_bytes = group_bytes(4 * QUADS);
    let body = if NIBBLES { 64 * QUADS } else { 128 * QUADS };
    // SAFETY: the caller's word; what is prefetched may lie anywhere.
    unsafe {
        for row in 0..2 * job.rows {
            _mm512_storeu_ps(job.out.add(row * LANES), _mm512_setzero_ps());
        }
        for group in 0..job.groups {
            let from = job.panel.add(group * (HEADER + body));
            if job.rows > WAITING_ROWS {
                for line in (0..HEADER + body).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD + line).cast());
                }
            }
            let floats = |place: usize| _mm512_loadu_ps(from.cast::<f32>().add(place * LANES));
            let (scales, offsets) = ([floats(0), floats(1)], [floats(2), floats(3)]);
            // All of a group's weights stay in registers while the rows go by.
            let weights =
                [unpack::<QUADS, NIBBLES>(from.add(HEADER)), unpack::<QUADS, NIBBLES>(from.add(HEADER + body / 2))];
            for row in 0..job.rows {
                let x = job.x.add(group * job.x_stride + row * row_bytes);
                let float = |place: usize| _mm512_set1_ps(x.add(8 * QUADS + 4 * place).cast::<f32>().read_unaligned());
                let first = if NIBBLES { 0 } else { x.add(8 * QUADS + 8).cast::<i32>().read_unaligned() };
                let mut high = [_mm512_setzero_si512(); 2];
                let mut low = [_mm512_set1_epi32(first); 2];
                for (quad, (left, right)) in weights[0].iter().zip(&weights[1]).enumerate() {
                    let four = |at: usize| _mm512_set1_epi32(x.add(4 * (at + quad)).cast::<i32>().read_unaligned());
                    for (vector, &weight) in [left, right].into_iter().enumerate() {
                        high[vector] = _mm512_dpbusd_epi32(high[vector], weight, four(0));
                        low[vector] = _mm512_dpbusd_epi32(low[vector], weight, four(QUADS));
                    }
                }
                for vector in 0..2 {
                    let to = job.out.add((2 * row + vector) * LANES);
                    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[vector]), low[vector]);
                    let scale = _mm512_mul_ps(scales[vector], float(0));
                    let product = _mm512_fmadd_ps(offsets[vector], float(1), _mm512_loadu_ps(to));
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, product));
                }
            }
        }
    }
}

/// The weights of a group for 16 outputs: for each four inputs, their bytes side by side.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn unpack<const QUADS: usize, const NIBBLES: bool>(from: *const u8) -> [__m512i; QUADS] {
    let mask = _mm512_set1_epi8(15);
    std::array::from_fn(|quad| {
        // SAFETY: the caller vouches for the pointer.
        unsafe {
            if !NIBBLES {
                return _mm512_loadu_si512(from.add(64 * quad).cast());
            }
            let both = _mm512_loadu_si512(from.add(64 * (quad / 2)).cast());
            _mm512_and_si512(if quad % 2 == 0 { both } else { _mm512_srli_epi32::<4>(both) }, mask)
        }
    })
}

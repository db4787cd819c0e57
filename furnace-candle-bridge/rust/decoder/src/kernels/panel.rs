//! Products of rows with panels.
//!
//! Every sum runs over the inputs one by one, with the same operations, whatever the number of rows and whether weights
//! are unpacked on the way or before. So a row's result is bit for bit the same alone and beside others.

use super::format::{BF16, F16, F32, Format, I8, Stored, U4};
use super::isa::Isa;

/// Inputs that are unpacked at a time: few enough to stay in the first-level cache, and whole groups of every format.
pub(super) const STRIP: usize = 128;

/// `out[r][c] = sum over k of x[r][k] * panel[k][c]`, for two vectors of columns; what is in `out` is added to if
/// `accumulate` says so.
pub(super) struct Product {
    pub x: *const f32,
    pub x_stride: usize,
    pub rows: usize,
    pub depth: usize,
    pub panel: *const f32,
    pub panel_stride: usize,
    pub out: *mut f32,
    pub out_stride: usize,
    pub accumulate: bool,
}

/// The product of rows with a panel in a format; `out` is [rows, width].
pub(super) struct Projection {
    pub x: *const f32,
    pub rows: usize,
    pub depth: usize,
    pub format: Format,
    pub panel: *const u8,
    pub out: *mut f32,
    /// Room for [STRIP, width] floats; used where there are many rows.
    pub unpacked: *mut f32,
}

/// # Safety
/// The processor has `I`; pointers are good for the sizes.
#[inline(always)]
pub(super) unsafe fn product<I: Isa>(job: &Product) {
    // Tiles of nearly the same height: a last one of a single row would cost as much as several.
    let tiles = job.rows.div_ceil(I::TILE_ROWS);
    let mut row = 0;
    for tile_index in 0..tiles {
        let height = (job.rows - row).div_ceil(tiles - tile_index);
        // SAFETY: rows from `row` to `row + height` are within those of the job.
        unsafe {
            let x = job.x.add(row * job.x_stride);
            let out = job.out.add(row * job.out_stride);
            match height {
                1 => tile::<I, 1>(job, x, out),
                2 => tile::<I, 2>(job, x, out),
                3 => tile::<I, 3>(job, x, out),
                4 => tile::<I, 4>(job, x, out),
                5 => tile::<I, 5>(job, x, out),
                6 => tile::<I, 6>(job, x, out),
                7 => tile::<I, 7>(job, x, out),
                8 => tile::<I, 8>(job, x, out),
                9 => tile::<I, 9>(job, x, out),
                10 => tile::<I, 10>(job, x, out),
                11 => tile::<I, 11>(job, x, out),
                _ => tile::<I, 12>(job, x, out),
            }
        }
        row += height;
    }
}

#[inline(always)]
unsafe fn tile<I: Isa, const ROWS: usize>(job: &Product, x: *const f32, out: *mut f32) {
    // SAFETY: the caller of `product` vouches for the pointers.
    unsafe {
        let mut sums = [[I::splat(0.0); 2]; ROWS];
        if job.accumulate {
            for (row, sum) in sums.iter_mut().enumerate() {
                let from = out.add(row * job.out_stride);
                *sum = [I::load(from), I::load(from.add(I::LANES))];
            }
        }
        for k in 0..job.depth {
            let from = job.panel.add(k * job.panel_stride);
            let weights = [I::load(from), I::load(from.add(I::LANES))];
            for (row, sum) in sums.iter_mut().enumerate() {
                let value = I::splat(*x.add(row * job.x_stride + k));
                sum[0] = I::fma(weights[0], value, sum[0]);
                sum[1] = I::fma(weights[1], value, sum[1]);
            }
        }
        for (row, sum) in sums.iter().enumerate() {
            let to = out.add(row * job.out_stride);
            I::store(to, sum[0]);
            I::store(to.add(I::LANES), sum[1]);
        }
    }
}

/// # Safety
/// The processor has `I`; pointers are good for the sizes, and `depth` is a multiple of the format's group.
#[inline(always)]
pub(super) unsafe fn project<I: Isa>(job: &Projection) {
    // SAFETY: the caller's word.
    unsafe {
        match job.format {
            Format::F32 => project_stored::<I, F32>(job),
            Format::F16 => project_stored::<I, F16>(job),
            Format::BF16 => project_stored::<I, BF16>(job),
            Format::U4 => project_stored::<I, U4>(job),
            Format::I8By16 => project_stored::<I, I8<16>>(job),
            Format::I8By32 => project_stored::<I, I8<32>>(job),
            Format::U4Quads | Format::U8By16Quads | Format::U8By32Quads => unreachable!("see `whole`"),
        }
    }
}

#[inline(always)]
unsafe fn project_stored<I: Isa, S: Stored>(job: &Projection) {
    // SAFETY: the caller's word.
    unsafe {
        match job.rows {
            rows if rows > I::NARROW_ROWS => wide::<I, S>(job),
            1 => narrow::<I, S, 1>(job),
            2 => narrow::<I, S, 2>(job),
            3 => narrow::<I, S, 3>(job),
            4 => narrow::<I, S, 4>(job),
            5 => narrow::<I, S, 5>(job),
            6 => narrow::<I, S, 6>(job),
            7 => narrow::<I, S, 7>(job),
            8 => narrow::<I, S, 8>(job),
            _ => wide::<I, S>(job),
        }
    }
}

#[inline(always)]
unsafe fn wide<I: Isa, S: Stored>(job: &Projection) {
    let width = 2 * I::LANES;
    let group_bytes = if S::SCALED { 8 * width } else { 0 } + S::GROUP / 2 * S::PAIR_BYTES * width;
    for start in (0..job.depth).step_by(STRIP) {
        let depth = STRIP.min(job.depth - start);
        // SAFETY: the strip is within the panel and the rows. What is prefetched need not be: behind the last strip it is
        // the next panel, if there is one.
        unsafe {
            let strip = job.panel.add(start / S::GROUP * group_bytes);
            unpack::<I, S>(strip, depth, job.unpacked);
            // While this one is multiplied, the next strip comes from memory.
            let bytes = depth / S::GROUP * group_bytes;
            for line in (0..bytes).step_by(64) {
                I::prefetch(strip.wrapping_add(bytes + line));
            }
            product::<I>(&Product {
                x: job.x.add(start),
                x_stride: job.depth,
                rows: job.rows,
                depth,
                panel: job.unpacked,
                panel_stride: width,
                out: job.out,
                out_stride: width,
                accumulate: start > 0,
            });
        }
    }
}

/// The scales and then the offsets of a group.
#[inline(always)]
unsafe fn header<I: Isa, S: Stored>(group: *const u8) -> [I::Vector; 4] {
    // SAFETY: a group of a scaled format begins with so many floats.
    unsafe {
        if S::SCALED {
            let floats = group.cast::<f32>();
            std::array::from_fn(|place| I::load(floats.add(place * I::LANES)))
        } else {
            [I::splat(0.0); 4]
        }
    }
}

/// Two inputs of all outputs of the panel: [input][vector].
#[inline(always)]
unsafe fn weights<I: Isa, S: Stored>(pair: *const u8, header: [I::Vector; 4]) -> [[I::Vector; 2]; 2] {
    // SAFETY: the caller's word.
    unsafe {
        let (mut first_left, mut second_left) = S::pair::<I>(pair, 0);
        let (mut first_right, mut second_right) = S::pair::<I>(pair, 1);
        if S::SCALED {
            first_left = I::fma(first_left, header[0], header[2]);
            first_right = I::fma(first_right, header[1], header[3]);
            second_left = I::fma(second_left, header[0], header[2]);
            second_right = I::fma(second_right, header[1], header[3]);
        }
        [[first_left, first_right], [second_left, second_right]]
    }
}

#[inline(always)]
unsafe fn narrow<I: Isa, S: Stored, const ROWS: usize>(job: &Projection) {
    let width = 2 * I::LANES;
    // SAFETY: the caller's word.
    unsafe {
        let mut sums = [[I::splat(0.0); 2]; ROWS];
        let mut from = job.panel;
        for group in 0..job.depth / S::GROUP {
            let header = header::<I, S>(from);
            if S::SCALED {
                from = from.add(8 * width);
            }
            for pair in 0..S::GROUP / 2 {
                let weights = weights::<I, S>(from, header);
                for (half, both) in weights.iter().enumerate() {
                    for (row, sum) in sums.iter_mut().enumerate() {
                        let value = I::splat(*job.x.add(row * job.depth + group * S::GROUP + 2 * pair + half));
                        sum[0] = I::fma(both[0], value, sum[0]);
                        sum[1] = I::fma(both[1], value, sum[1]);
                    }
                }
                from = from.add(S::PAIR_BYTES * width);
            }
        }
        for (row, sum) in sums.iter().enumerate() {
            I::store(job.out.add(row * width), sum[0]);
            I::store(job.out.add(row * width + I::LANES), sum[1]);
        }
    }
}

#[inline(always)]
unsafe fn unpack<I: Isa, S: Stored>(mut from: *const u8, depth: usize, mut to: *mut f32) {
    let width = 2 * I::LANES;
    // SAFETY: the caller's word.
    unsafe {
        for _ in 0..depth / S::GROUP {
            let header = header::<I, S>(from);
            if S::SCALED {
                from = from.add(8 * width);
            }
            for _ in 0..S::GROUP / 2 {
                for both in weights::<I, S>(from, header) {
                    I::store(to, both[0]);
                    I::store(to.add(I::LANES), both[1]);
                    to = to.add(width);
                }
                from = from.add(S::PAIR_BYTES * width);
            }
        }
    }
}

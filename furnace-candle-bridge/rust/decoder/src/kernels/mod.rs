//! Kernels, compiled for several sets of instructions; which is used is decided when the program runs.

mod format;
mod isa;
mod panel;
mod rows;
#[cfg(target_arch = "x86_64")]
mod vnni;
mod whole;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::LazyLock;

pub use format::Format;
use isa::{Isa, Portable};
use panel::{Product, Projection};
pub use rows::Activation;
pub use whole::Quantized;
use whole::Whole;

/// The kernels for one set of instructions.
pub struct Kernels {
    name: &'static str,
    width: usize,
    tile_rows: usize,
    product: unsafe fn(&Product),
    project: unsafe fn(&Projection),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    gated: unsafe fn(Activation, &[f32], &[f32], &mut [f32]),
    cap: unsafe fn(&mut [f32], f32),
    softmax: unsafe fn(&mut [f32]),
    rotate: unsafe fn(&mut [f32], &[f32], &[f32]),
    /// For formats with scales, products in whole numbers.
    whole: Option<Whole>,
}

/// Compiles all kernels with a set of instructions switched on.
macro_rules! kernels {
    ($name:literal, $isa:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn product(job: &Product) {
            // SAFETY: the caller vouches for the job, and by calling this for the processor.
            unsafe { panel::product::<$isa>(job) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn project(job: &Projection) {
            // SAFETY: as above.
            unsafe { panel::project::<$isa>(job) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn rms_norm(row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
            rows::rms_norm(row, weight, eps, out);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn gated(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
            rows::gated(activation, gate, up, out);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn cap(values: &mut [f32], cap: f32) {
            rows::cap(values, cap);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn softmax(scores: &mut [f32]) {
            rows::softmax(scores);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
            rows::rotate(head, cosines, sines);
        }
        Kernels {
            name: $name,
            width: 2 * <$isa>::LANES,
            tile_rows: <$isa>::TILE_ROWS,
            product,
            project,
            rms_norm,
            gated,
            cap,
            softmax,
            rotate,
            whole: None,
        }
    }};
}

/// What this processor can run, the best first.
static AVAILABLE: LazyLock<Vec<Kernels>> = LazyLock::new(|| {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
            let floats = kernels!("avx512", x86::Avx512, "avx512f,avx512vl,avx2,fma,f16c");
            if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni") {
                found.push(Kernels { name: "avx512vnni", whole: Some(Whole::VNNI), ..floats });
            }
            found.push(floats);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            found.push(kernels!("avx2", x86::Avx2, "avx2,fma,f16c"));
        }
    }
    found.push(kernels!("portable", Portable));
    found
});

impl Kernels {
    /// The kernels that this processor can run, the best first.
    pub fn available() -> &'static [Kernels] {
        &AVAILABLE
    }

    /// What they are called: `avx512vnni`, `avx512`, `avx2` or `portable`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Outputs of a panel; a power of two.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How weights of a format lie in panels for these kernels.
    pub fn format(&self, format: Format) -> Format {
        if self.whole.is_some() { format.whole() } else { format }
    }

    /// Rows that are best multiplied at once.
    pub fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// Computes `out[r][c] = sum over k of x[r][k] * panel[k][c]` for `width` columns; adds it to what is in `out` if
    /// `accumulate` says so.
    ///
    /// # Panics
    /// A slice is too short.
    #[allow(clippy::too_many_arguments)] // three matrices, each with its stride
    pub fn product(
        &self,
        x: &[f32],
        x_stride: usize,
        rows: usize,
        depth: usize,
        panel: &[f32],
        panel_stride: usize,
        out: &mut [f32],
        out_stride: usize,
        accumulate: bool,
    ) {
        if rows == 0 {
            return;
        }
        assert!(x.len() >= (rows - 1) * x_stride + depth, "too few inputs");
        assert!(depth == 0 || panel.len() >= (depth - 1) * panel_stride + self.width, "too small a panel");
        assert!(out.len() >= (rows - 1) * out_stride + self.width, "too little room");
        let (x, panel, out) = (x.as_ptr(), panel.as_ptr(), out.as_mut_ptr());
        let job = Product { x, x_stride, rows, depth, panel, panel_stride, out, out_stride, accumulate };
        // SAFETY: the slices are long enough, and only kernels that the processor can run are made.
        unsafe { (self.product)(&job) }
    }

    /// Multiplies rows [rows, depth] with a panel, into [rows, width].
    ///
    /// `scratch` holds what is unpacked.
    ///
    /// # Panics
    /// A slice is too short, or `depth` is no multiple of the format's group.
    pub fn project(
        &self,
        x: &[f32],
        depth: usize,
        format: Format,
        panel: &[u8],
        out: &mut [f32],
        scratch: &mut Vec<f32>,
    ) {
        let rows = out.len() / self.width;
        assert!(!format.is_whole(), "a format for whole numbers");
        assert!(depth.is_multiple_of(format.group()), "a group is cut");
        assert!(x.len() >= rows * depth, "too few inputs");
        assert!(panel.len() >= depth / format.group() * format.group_bytes(self.width), "too small a panel");
        scratch.resize(panel::STRIP * self.width, 0.0);
        let (x, panel, out, unpacked) = (x.as_ptr(), panel.as_ptr(), out.as_mut_ptr(), scratch.as_mut_ptr());
        let job = Projection { x, rows, depth, format, panel, out, unpacked };
        // SAFETY: as in `product`.
        unsafe { (self.project)(&job) }
    }

    /// The RMS norm of a row, times a weight.
    pub fn rms_norm(&self, row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        // SAFETY: only kernels that the processor can run are made.
        unsafe { (self.rms_norm)(row, weight, eps, out) }
    }

    /// `activation(gate) * up`.
    pub fn gated(&self, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { (self.gated)(activation, gate, up, out) }
    }

    /// `cap * tanh(value / cap)`, in place.
    pub fn cap(&self, values: &mut [f32], cap: f32) {
        // SAFETY: as above.
        unsafe { (self.cap)(values, cap) }
    }

    /// Scores to weights that add up to 1; none of them may be masked.
    pub fn softmax(&self, scores: &mut [f32]) {
        // SAFETY: as above.
        unsafe { (self.softmax)(scores) }
    }

    /// Rotates the pairs (i, i + half) of a head.
    ///
    /// # Panics
    /// The head is shorter than `cosines`.
    pub fn rotate(&self, head: &mut [f32], cosines: &[f32], sines: &[f32]) {
        // SAFETY: as above.
        unsafe { (self.rotate)(head, cosines, sines) }
    }
}

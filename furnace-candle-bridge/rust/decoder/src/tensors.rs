//! Candle's tensors as slices.

use std::marker::PhantomData;

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor};

/// The floats of a tensor whose rows follow each other.
///
/// # Errors
/// It holds no floats, or has gaps.
pub(crate) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("a tensor with gaps"),
    }
}

/// Calls something with the floats of a tensor on the CPU.
///
/// # Errors
/// As of `floats`, and those of the call.
pub(crate) fn with_floats<T>(
    tensor: &Tensor,
    call: impl FnOnce(&[f32]) -> crate::error::Result<T>,
) -> crate::error::Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => call(floats(storage, layout)?),
        _ => Err(crate::error::Error::Failed("a tensor is not on the CPU".into())),
    }
}

/// A slice of which several threads write parts that don't overlap.
pub(crate) struct Disjoint<'a> {
    start: *mut f32,
    len: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: who writes promises that nobody else writes the same place; nobody reads.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub fn new(slice: &'a mut [f32]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// Writes values from a place on.
    ///
    /// # Safety
    /// No other thread writes there.
    ///
    /// # Panics
    /// They reach beyond the end.
    pub unsafe fn write(&self, at: usize, values: &[f32]) {
        assert!(at <= self.len && values.len() <= self.len - at, "beyond the end");
        // SAFETY: it is within the slice, which is borrowed, and the caller vouches for the rest.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.start.add(at), values.len()) }
    }
}

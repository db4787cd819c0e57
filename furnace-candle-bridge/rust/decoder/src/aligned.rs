//! Memory that begins on a cache line: a vector load from it never crosses two.

use crate::error::{Error, Result};

const LINE_BYTES: usize = 64;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// Bytes, zero at first, seen as bytes or as floats.
pub struct Aligned {
    lines: Vec<Line>,
    bytes: usize,
}

impl Aligned {
    /// Allocates `bytes` bytes.
    ///
    /// # Errors
    /// `OutOfMemory` instead of the abort that an ordinary allocation would be.
    pub fn zeroed(bytes: usize) -> Result<Self> {
        let count = bytes.div_ceil(LINE_BYTES);
        let mut lines = Vec::new();
        lines
            .try_reserve_exact(count)
            .map_err(|_| Error::OutOfMemory(format!("there is no memory for {bytes} bytes")))?;
        lines.resize(count, Line([0; LINE_BYTES]));
        Ok(Aligned { lines, bytes })
    }

    /// Allocates `count` floats.
    ///
    /// # Errors
    /// As of `zeroed`.
    pub fn zeroed_floats(count: usize) -> Result<Self> {
        match count.checked_mul(size_of::<f32>()) {
            Some(bytes) => Self::zeroed(bytes),
            None => Err(Error::OutOfMemory(format!("there is no memory for {count} floats"))),
        }
    }

    /// Everything, as bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `lines` holds at least `bytes` bytes, which are plain.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.bytes) }
    }

    /// Everything, as bytes to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.bytes) }
    }

    /// Everything, as floats.
    pub fn floats(&self) -> &[f32] {
        // SAFETY: a line is aligned for floats, and every pattern of bits is one.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.bytes / size_of::<f32>()) }
    }

    /// Everything, as floats to write.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `floats`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.bytes / size_of::<f32>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_begins_on_a_cache_line_and_is_zero() {
        let mut memory = Aligned::zeroed(130).unwrap();
        assert_eq!(memory.bytes().as_ptr() as usize % LINE_BYTES, 0);
        assert_eq!(memory.bytes(), [0; 130]);
        memory.floats_mut()[31] = 1.0;
        assert_eq!(memory.bytes_mut()[127], 0x3f);
    }

    #[test]
    fn what_no_machine_has_is_an_error_and_no_abort() {
        assert!(matches!(Aligned::zeroed(1 << 62), Err(Error::OutOfMemory(_))));
        assert!(matches!(Aligned::zeroed_floats(usize::MAX), Err(Error::OutOfMemory(_))));
    }
}

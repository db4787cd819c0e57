//! What one sequence holds, and what lies where in a block of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::aligned::Aligned;
use crate::error::{Error, Result};

/// Tokens in a block.
pub const KV_BLOCK: usize = 32;
/// Values of a head are padded to a multiple of this, so that every panel of a block is whole.
const PADDING: usize = 32;

/// What a block holds, for each layer and each key head: the keys [head width, tokens], a panel for scores, and then the
/// values [tokens, padded head width], panels for sums.
#[derive(Clone, Copy, Debug)]
pub struct KvShape {
    pub layers: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl KvShape {
    /// Floats between the values of two tokens.
    pub fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(PADDING)
    }

    fn head_floats(&self) -> usize {
        KV_BLOCK * (self.head_dim + self.padded_dim())
    }

    pub(super) fn block_floats(&self) -> usize {
        self.layers * self.heads * self.head_floats()
    }

    fn keys_at(&self, layer: usize, head: usize) -> usize {
        (layer * self.heads + head) * self.head_floats()
    }

    fn values_at(&self, layer: usize, head: usize) -> usize {
        self.keys_at(layer, head) + KV_BLOCK * self.head_dim
    }
}

/// A block in memory; it counts itself.
pub(super) struct KvBlock {
    pub(super) data: Aligned,
    pub(super) used: Arc<AtomicUsize>,
}

impl Drop for KvBlock {
    fn drop(&mut self) {
        self.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What one sequence holds: just as many blocks as its tokens need.
#[derive(Default)]
pub struct Sequence {
    pub(super) blocks: Vec<Arc<KvBlock>>,
    pub(super) length: usize,
}

impl Sequence {
    /// Writes a token's keys and values, [heads, head width], of one layer.
    ///
    /// # Errors
    /// `Failed`: the block is shared, or there is none, which `KvCache::grow` sees to.
    pub fn write(
        &mut self,
        shape: &KvShape,
        layer: usize,
        position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<()> {
        let block = self.blocks.get_mut(position / KV_BLOCK).and_then(Arc::get_mut);
        let Some(block) = block else {
            return Err(Error::Failed(format!("there is no block to write position {position} to")));
        };
        let (data, token, width, padded) =
            (block.data.floats_mut(), position % KV_BLOCK, shape.head_dim, shape.padded_dim());
        for head in 0..shape.heads {
            let at = shape.keys_at(layer, head) + token;
            for (place, &key) in keys[head * width..(head + 1) * width].iter().enumerate() {
                data[at + place * KV_BLOCK] = key;
            }
            let at = shape.values_at(layer, head) + token * padded;
            data[at..at + width].copy_from_slice(&values[head * width..(head + 1) * width]);
        }
        Ok(())
    }

    /// The keys of a block, [head width, tokens].
    pub fn keys(&self, shape: &KvShape, layer: usize, head: usize, block: usize) -> &[f32] {
        let at = shape.keys_at(layer, head);
        &self.blocks[block].data.floats()[at..at + KV_BLOCK * shape.head_dim]
    }

    /// The values of a block, [tokens, padded head width].
    pub fn values(&self, shape: &KvShape, layer: usize, head: usize, block: usize) -> &[f32] {
        let at = shape.values_at(layer, head);
        &self.blocks[block].data.floats()[at..at + KV_BLOCK * shape.padded_dim()]
    }

    /// How many blocks it needs to hold `length` tokens; one more where it would write to a shared one.
    pub(super) fn needed(&self, length: usize) -> usize {
        length.div_ceil(KV_BLOCK) - self.blocks.len() + usize::from(self.must_copy(length))
    }

    pub(super) fn must_copy(&self, length: usize) -> bool {
        let is_cut = length > self.length && !self.length.is_multiple_of(KV_BLOCK);
        is_cut && self.blocks.last().is_some_and(|block| Arc::strong_count(block) > 1)
    }
}

//! The KV cache: blocks of tokens, shared between sequences that begin alike, and copied when one of them writes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::aligned::Aligned;
use crate::error::{Error, Result, invalid};

mod sequence;

use sequence::KvBlock;
pub use sequence::{KV_BLOCK, KvShape, Sequence};

/// All sequences and their blocks.
pub struct KvCache {
    shape: KvShape,
    max_blocks: usize,
    max_open: usize,
    used: Arc<AtomicUsize>,
    sequences: HashMap<u64, Sequence>,
    next: u64,
}

impl KvCache {
    /// An empty cache; memory is taken when it is needed.
    pub fn new(shape: KvShape, max_blocks: usize, max_open: usize) -> Self {
        KvCache { shape, max_blocks, max_open, used: Arc::default(), sequences: HashMap::new(), next: 0 }
    }

    /// Blocks in use, shared ones counted once.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Makes an empty sequence; its number is never given out again.
    ///
    /// # Errors
    /// `OutOfKv`: too many are open.
    pub fn open(&mut self) -> Result<u64> {
        if self.sequences.len() >= self.max_open {
            return Err(Error::OutOfKv(format!("all {} sequences are open", self.max_open)));
        }
        self.next += 1;
        self.sequences.insert(self.next, Sequence::default());
        Ok(self.next)
    }

    /// Ends a sequence.
    ///
    /// # Errors
    /// `Invalid`: it is not open.
    pub fn release(&mut self, id: u64) -> Result<()> {
        match self.sequences.remove(&id) {
            Some(_) => Ok(()),
            None => released(),
        }
    }

    /// Ends all sequences.
    pub fn clear(&mut self) {
        self.sequences.clear();
    }

    /// Tokens that a sequence holds.
    ///
    /// # Errors
    /// `Invalid`: it is not open.
    pub fn length(&self, id: u64) -> Result<usize> {
        Ok(self.sequence(id)?.length)
    }

    fn sequence(&self, id: u64) -> Result<&Sequence> {
        match self.sequences.get(&id) {
            Some(sequence) => Ok(sequence),
            None => released(),
        }
    }

    fn check_length(&self, id: u64, length: usize) -> Result<()> {
        let held = self.length(id)?;
        if length > held {
            return invalid(format!("length is {length}; the state holds {held} tokens"));
        }
        Ok(())
    }

    /// Makes a sequence of the first `length` tokens of another: whole blocks are shared, a cut one is copied.
    ///
    /// # Errors
    /// `OutOfKv`: there is no room. `Invalid`: there is no such prefix. Nothing has changed then.
    pub fn fork(&mut self, id: u64, length: usize) -> Result<u64> {
        self.check_length(id, length)?;
        let whole = length / KV_BLOCK;
        let mut copies = self.allocate(usize::from(!length.is_multiple_of(KV_BLOCK)))?;
        let source = self.sequence(id)?;
        let mut blocks = source.blocks[..whole].to_vec();
        for copy in &mut copies {
            copy.data.floats_mut().copy_from_slice(source.blocks[whole].data.floats());
        }
        let fork = self.open()?;
        blocks.extend(copies.into_iter().map(Arc::new));
        self.sequences.insert(fork, Sequence { blocks, length });
        Ok(fork)
    }

    /// Forgets the tokens of a sequence from `length` on.
    ///
    /// # Errors
    /// `Invalid`: it does not hold so many.
    pub fn truncate(&mut self, id: u64, length: usize) -> Result<()> {
        self.check_length(id, length)?;
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.blocks.truncate(length.div_ceil(KV_BLOCK));
            sequence.length = length;
        }
        Ok(())
    }

    /// Gives sequences the blocks that they need to hold more tokens, which are then theirs alone from their end on.
    ///
    /// # Errors
    /// `OutOfKv`: they don't all fit. `Invalid`: one is not open. Nothing has changed then.
    pub fn grow(&mut self, lengths: &[(u64, usize)]) -> Result<()> {
        let mut needed = 0;
        for &(id, length) in lengths {
            needed += self.sequence(id)?.needed(length);
        }
        let mut blocks = self.allocate(needed)?;
        for &(id, length) in lengths {
            let Some(sequence) = self.sequences.get_mut(&id) else { return released() };
            if sequence.must_copy(length)
                && let (Some(last), Some(mut copy)) = (sequence.blocks.last_mut(), blocks.pop())
            {
                copy.data.floats_mut().copy_from_slice(last.data.floats());
                *last = Arc::new(copy);
            }
            while sequence.blocks.len() < length.div_ceil(KV_BLOCK)
                && let Some(block) = blocks.pop()
            {
                sequence.blocks.push(Arc::new(block));
            }
            sequence.length = length;
        }
        Ok(())
    }

    /// Takes sequences out, in this order, for a step that writes to them; `put_back` ends it.
    ///
    /// # Errors
    /// `Invalid`: one is not open; then none was taken.
    pub fn take(&mut self, ids: &[u64]) -> Result<Vec<Sequence>> {
        for &id in ids {
            self.sequence(id)?;
        }
        Ok(ids.iter().filter_map(|id| self.sequences.remove(id)).collect())
    }

    /// Puts back what `take` took.
    pub fn put_back(&mut self, ids: &[u64], sequences: Vec<Sequence>) {
        self.sequences.extend(ids.iter().copied().zip(sequences));
    }

    fn allocate(&self, count: usize) -> Result<Vec<KvBlock>> {
        let used = self.used();
        if count > self.max_blocks - used {
            return Err(Error::OutOfKv(format!(
                "{count} more blocks of {KV_BLOCK} tokens are needed; {used} of {} are used",
                self.max_blocks
            )));
        }
        let mut blocks = Vec::with_capacity(count);
        for _ in 0..count {
            let data = Aligned::zeroed_floats(self.shape.block_floats())
                .map_err(|error| Error::OutOfKv(format!("a block of the KV cache: {error}")))?;
            self.used.fetch_add(1, Ordering::Relaxed);
            blocks.push(KvBlock { data, used: Arc::clone(&self.used) });
        }
        Ok(blocks)
    }
}

fn released<T>() -> Result<T> {
    invalid("the state was released".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { layers: 2, heads: 2, head_dim: 6 };

    fn cache(blocks: usize) -> KvCache {
        KvCache::new(SHAPE, blocks, 4)
    }

    fn write(cache: &mut KvCache, id: u64, positions: std::ops::Range<usize>, mark: f32) {
        let mut taken = cache.take(&[id]).unwrap();
        for position in positions {
            for layer in 0..SHAPE.layers {
                let row: Vec<f32> =
                    (0..12).map(|place| mark + position as f32 + (100 * layer + place) as f32 * 0.001).collect();
                let values: Vec<f32> = row.iter().map(|key| -key).collect();
                taken[0].write(&SHAPE, layer, position, &row, &values).unwrap();
            }
        }
        cache.put_back(&[id], taken);
    }

    /// What is written at a position, found through the layout.
    fn read(cache: &KvCache, id: u64, layer: usize, position: usize, place: usize) -> (f32, f32) {
        let (head, column) = (place / 6, place % 6);
        let sequence = cache.sequence(id).unwrap();
        let (block, token) = (position / KV_BLOCK, position % KV_BLOCK);
        let keys = sequence.keys(&SHAPE, layer, head, block);
        let values = sequence.values(&SHAPE, layer, head, block);
        (keys[column * KV_BLOCK + token], values[token * SHAPE.padded_dim() + column])
    }

    fn expect(cache: &KvCache, id: u64, positions: std::ops::Range<usize>, mark: f32) {
        for position in positions {
            for layer in 0..SHAPE.layers {
                for place in 0..12 {
                    let value = mark + position as f32 + (100 * layer + place) as f32 * 0.001;
                    assert_eq!(read(cache, id, layer, position, place), (value, -value));
                }
            }
        }
    }

    #[test]
    fn what_is_written_is_read_and_goes_with_its_sequence() {
        let mut cache = cache(4);
        let id = cache.open().unwrap();
        cache.grow(&[(id, 70)]).unwrap();
        write(&mut cache, id, 0..70, 0.0);
        expect(&cache, id, 0..70, 0.0);
        assert_eq!((cache.used(), cache.length(id).unwrap()), (3, 70));
        cache.truncate(id, 64).unwrap();
        assert_eq!(cache.used(), 2);
        cache.release(id).unwrap();
        assert_eq!(cache.used(), 0);
        assert!(cache.release(id).is_err());
    }

    #[test]
    fn a_fork_shares_whole_blocks_and_copies_the_cut_one() {
        let mut cache = cache(8);
        let origin = cache.open().unwrap();
        cache.grow(&[(origin, 80)]).unwrap();
        write(&mut cache, origin, 0..80, 0.0);
        let fork = cache.fork(origin, 40).unwrap();
        assert_eq!((cache.used(), cache.length(fork).unwrap()), (4, 40));
        cache.grow(&[(fork, 50)]).unwrap();
        write(&mut cache, fork, 40..50, 500.0);
        expect(&cache, origin, 0..80, 0.0);
        expect(&cache, fork, 0..40, 0.0);
        expect(&cache, fork, 40..50, 500.0);
        cache.release(origin).unwrap();
        expect(&cache, fork, 0..40, 0.0);
        assert_eq!(cache.used(), 2);
    }

    #[test]
    fn a_shared_block_that_was_cut_is_copied_before_it_is_written() {
        let mut cache = cache(3);
        let origin = cache.open().unwrap();
        cache.grow(&[(origin, 64)]).unwrap();
        write(&mut cache, origin, 0..64, 0.0);
        let fork = cache.fork(origin, 64).unwrap();
        assert_eq!(cache.used(), 2);
        cache.truncate(fork, 60).unwrap();
        cache.grow(&[(fork, 62)]).unwrap();
        assert_eq!(cache.used(), 3);
        write(&mut cache, fork, 60..62, 900.0);
        expect(&cache, origin, 0..64, 0.0);
        expect(&cache, fork, 0..60, 0.0);
        cache.truncate(origin, 60).unwrap();
        cache.grow(&[(origin, 62)]).unwrap();
        assert_eq!(cache.used(), 3);
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut cache = cache(3);
        let (one, other) = (cache.open().unwrap(), cache.open().unwrap());
        cache.grow(&[(one, 33)]).unwrap();
        assert!(matches!(cache.grow(&[(one, 64), (other, 33)]), Err(Error::OutOfKv(_))));
        assert_eq!((cache.used(), cache.length(one).unwrap(), cache.length(other).unwrap()), (2, 33, 0));
        cache.grow(&[(other, 32)]).unwrap();
        assert!(matches!(cache.fork(one, 33), Err(Error::OutOfKv(_))));
        assert!(cache.fork(one, 34).is_err());
        let (fork, last) = (cache.fork(one, 32).unwrap(), cache.open().unwrap());
        assert!(matches!(cache.open(), Err(Error::OutOfKv(_))));
        assert!(matches!(cache.fork(one, 32), Err(Error::OutOfKv(_))));
        for id in [one, other, fork, last] {
            cache.release(id).unwrap();
        }
        assert_eq!(cache.used(), 0);
    }
}

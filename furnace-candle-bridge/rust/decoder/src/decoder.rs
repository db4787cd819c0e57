//! A model with a KV cache: states, and steps that append to them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::batch::{Chunk, Plan};
use crate::config::Bounds;
use crate::error::{Error, Result, invalid};
use crate::kv::KvCache;
use crate::model::{Model, Rows};

const NO_TOKEN: i64 = -1;

/// A model with its KV cache.
pub struct Decoder {
    model: Arc<Model>,
    max_context: usize,
    cache: Mutex<KvCache>,
    panic_on: AtomicI64,
}

impl Decoder {
    /// Gives a model a cache; memory for it is taken when it is needed.
    ///
    /// # Errors
    /// `Invalid`: a bound is 0.
    pub fn new(model: Arc<Model>, bounds: Bounds) -> Result<Self> {
        if bounds.max_context == 0 || bounds.max_open == 0 || bounds.kv_blocks == 0 {
            return invalid("max_context, max_open and kv_blocks must be at least 1".into());
        }
        Ok(Decoder {
            cache: Mutex::new(KvCache::new(model.kv_shape(), bounds.kv_blocks, bounds.max_open)),
            model,
            max_context: bounds.max_context,
            panic_on: AtomicI64::new(NO_TOKEN),
        })
    }

    /// The KV cache; see `KvCache` for what can be done between steps.
    pub fn cache(&self) -> MutexGuard<'_, KvCache> {
        // What a panic leaves behind is whole: see `step`.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets every step panic that has this token; for tests of what happens then.
    pub fn panic_on(&self, token: Option<u32>) {
        self.panic_on.store(token.map_or(NO_TOKEN, i64::from), Ordering::Relaxed);
    }

    /// Appends the chunks to their states in one forward pass.
    ///
    /// # Errors
    /// As the variants of `Error` say; whichever it is, no state has changed. A panic is `Failed`.
    pub fn step(&self, batch: &[Chunk]) -> Result<Rows> {
        let mut cache = self.cache();
        let vocab_size = self.model.config().vocab_size;
        let plan = Plan::new(batch, &cache, self.max_context, vocab_size, self.model.run_rows())?;
        let lengths: Vec<_> = plan.states.iter().copied().zip(plan.lengths.iter().copied()).collect();
        cache.grow(&lengths)?;
        let mut sequences = cache.take(&plan.states)?;
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.model.pool().install(|| {
                let panic_on = self.panic_on.load(Ordering::Relaxed);
                let tokens = batch.iter().flat_map(|chunk| &chunk.tokens);
                assert!(!tokens.into_iter().any(|&token| token == panic_on), "a panic that was asked for");
                self.model.forward(&plan, &mut sequences)
            })
        }));
        cache.put_back(&plan.states, sequences);
        let result = result.unwrap_or_else(|panic| Err(Error::Failed(panic_text(&*panic))));
        if result.is_err() {
            for chunk in batch {
                cache.truncate(chunk.state, chunk.position)?;
            }
        }
        result
    }
}

/// What a panic said.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("without a text"))
}

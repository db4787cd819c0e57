//! The chunks of a step, and how they lie in rows.

use std::collections::HashSet;
use std::ops::Range;

use crate::attention::Run;
use crate::error::{Error, Result, invalid};
use crate::kv::KvCache;

/// Which rows a chunk gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    None,
    Last,
    All,
    /// The values after the last norm, of all tokens.
    Hidden,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Chunk {
    pub state: u64,
    pub tokens: Vec<i64>,
    /// Of the first token; as many as the state holds.
    pub position: usize,
    pub output: Output,
}

/// A step, checked and laid out: each token is a row.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub states: Vec<u64>,
    /// The number of tokens that each state holds afterwards.
    pub lengths: Vec<usize>,
    pub tokens: Vec<usize>,
    pub positions: Vec<usize>,
    /// The rows of each chunk.
    pub rows: Vec<Range<usize>>,
    pub runs: Vec<Run>,
    /// Rows to return.
    pub wanted: Vec<usize>,
    pub hidden: bool,
}

impl Plan {
    /// Lays a batch out; runs of one sequence have at most `run_rows` rows.
    ///
    /// # Errors
    /// `Invalid`, `UnknownToken`: the batch makes no sense; nothing has changed.
    pub fn new(
        batch: &[Chunk],
        cache: &KvCache,
        max_context: usize,
        vocab_size: usize,
        run_rows: usize,
    ) -> Result<Self> {
        let hidden = batch.iter().filter(|chunk| chunk.output == Output::Hidden).count();
        if hidden != 0 && hidden != batch.len() {
            return invalid("hidden values can't be asked for together with other outputs".into());
        }
        let mut plan = Plan { hidden: hidden != 0, ..Plan::default() };
        let mut seen = HashSet::new();
        for (sequence, chunk) in batch.iter().enumerate() {
            let held = cache.length(chunk.state)?;
            if !seen.insert(chunk.state) {
                return invalid("a state has two chunks in one batch".into());
            }
            if chunk.tokens.is_empty() {
                return invalid("a chunk has no tokens".into());
            }
            if chunk.position != held {
                return invalid(format!("position is {}; the state holds {held} tokens", chunk.position));
            }
            if chunk.tokens.len() > max_context - held {
                return invalid(format!("the chunk ends behind max_context, {max_context}"));
            }
            plan.add(sequence, chunk, vocab_size, run_rows)?;
        }
        Ok(plan)
    }

    fn add(&mut self, sequence: usize, chunk: &Chunk, vocab_size: usize, run_rows: usize) -> Result<()> {
        let first = self.tokens.len();
        for &token in &chunk.tokens {
            match usize::try_from(token) {
                Ok(token) if token < vocab_size => self.tokens.push(token),
                _ => return Err(Error::UnknownToken(format!("a token is not in the vocabulary of {vocab_size}"))),
            }
        }
        let rows = first..self.tokens.len();
        self.states.push(chunk.state);
        self.lengths.push(chunk.position + rows.len());
        self.positions.extend(chunk.position..chunk.position + rows.len());
        self.runs.extend(rows.clone().step_by(run_rows).map(|first_row| Run {
            sequence,
            first_row,
            rows: run_rows.min(rows.end - first_row),
            position: chunk.position + first_row - first,
        }));
        match chunk.output {
            Output::None => {}
            Output::Last => self.wanted.push(rows.end - 1),
            Output::All | Output::Hidden => self.wanted.extend(rows.clone()),
        }
        self.rows.push(rows);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvShape;

    fn cache() -> (KvCache, u64, u64) {
        let mut cache = KvCache::new(KvShape { layers: 1, heads: 1, head_dim: 2 }, 9, 4);
        let (one, other) = (cache.open().unwrap(), cache.open().unwrap());
        cache.grow(&[(other, 3)]).unwrap();
        (cache, one, other)
    }

    fn chunk(state: u64, tokens: &[i64], position: usize, output: Output) -> Chunk {
        Chunk { state, tokens: tokens.to_vec(), position, output }
    }

    #[test]
    fn chunks_lie_behind_each_other_and_are_cut_into_runs() {
        let (cache, one, other) = cache();
        let batch = [chunk(one, &[5, 6, 7, 8, 9], 0, Output::Last), chunk(other, &[1, 2], 3, Output::All)];
        let plan = Plan::new(&batch, &cache, 64, 10, 2).unwrap();
        assert_eq!(plan.tokens, [5, 6, 7, 8, 9, 1, 2]);
        assert_eq!(plan.positions, [0, 1, 2, 3, 4, 3, 4]);
        assert_eq!((plan.wanted, plan.lengths), (vec![4, 5, 6], vec![5, 5]));
        let runs: Vec<_> = plan.runs.iter().map(|run| (run.sequence, run.first_row, run.rows, run.position)).collect();
        assert_eq!(runs, [(0, 0, 2, 0), (0, 2, 2, 2), (0, 4, 1, 4), (1, 5, 2, 3)]);
    }

    #[test]
    fn batches_that_make_no_sense_are_refused_with_the_reason() {
        let (cache, one, other) = cache();
        let wrong = [
            (vec![chunk(9, &[1], 0, Output::Last)], "released"),
            (vec![chunk(one, &[1], 0, Output::Last), chunk(one, &[1], 0, Output::Last)], "two chunks"),
            (vec![chunk(one, &[], 0, Output::Last)], "no tokens"),
            (vec![chunk(other, &[1], 2, Output::Last)], "position is 2; the state holds 3"),
            (vec![chunk(one, &[1; 65], 0, Output::Last)], "max_context, 64"),
            (vec![chunk(one, &[1], 0, Output::Hidden), chunk(other, &[1], 3, Output::Last)], "together with"),
            (vec![chunk(one, &[10], 0, Output::Last)], "vocabulary of 10"),
            (vec![chunk(one, &[-1], 0, Output::Last)], "vocabulary of 10"),
        ];
        for (batch, reason) in wrong {
            let error = Plan::new(&batch, &cache, 64, 10, 4).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}

//! Attention over the KV cache, as a custom op of candle.

use std::cell::RefCell;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape};
use rayon::prelude::*;

use crate::kernels::Kernels;
use crate::kv::{KV_BLOCK, KvShape, Sequence};
use crate::tensors::{Disjoint, floats};

/// Rows of one sequence that follow each other and are attended to together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Which of the step's sequences.
    pub sequence: usize,
    pub first_row: usize,
    pub rows: usize,
    /// Of the first row.
    pub position: usize,
}

/// Attention in one layer: rows of queries, keys and values, the first ones scaled, to [rows, heads x head width]. The
/// step's keys and values are already in the cache.
///
/// A row's result depends on its own sequence alone: which rows are in one run decides what is read together, and not
/// in which order a sum is taken.
pub(crate) struct Attention<'a> {
    pub kernels: &'static Kernels,
    pub shape: &'a KvShape,
    pub sequences: &'a [Sequence],
    pub runs: &'a [Run],
    pub heads: usize,
    pub layer: usize,
    /// How many tokens a token sees, itself included.
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { queries: vec![], scores: vec![], sums: vec![] }) };
}

struct Scratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
}

impl Attention<'_> {
    /// Query heads that share a key head.
    fn group(&self) -> usize {
        self.heads / self.shape.heads
    }

    fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    fn attend(&self, qkv: &[f32], run: Run, head: usize, target: &Disjoint<'_>) {
        let (width, group) = (self.shape.head_dim, self.group());
        let row_width = (self.heads + 2 * self.shape.heads) * width;
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.queries.clear();
            for row in run.first_row..run.first_row + run.rows {
                let at = row * row_width + head * group * width;
                scratch.queries.extend_from_slice(&qkv[at..at + group * width]);
            }
            self.weigh(scratch, run, head);
            self.sum_values(scratch, run, head);
            let padded = self.shape.padded_dim();
            for (query, sums) in scratch.sums.chunks_exact(padded).enumerate() {
                let (row, head) = (run.first_row + query / group, head * group + query % group);
                // SAFETY: no other task has these rows and this key head.
                unsafe { target.write((row * self.heads + head) * width, &sums[..width]) }
            }
        });
    }

    /// The blocks that a run sees.
    fn blocks(&self, run: Run) -> std::ops::Range<usize> {
        self.first_seen(run.position) / KV_BLOCK..(run.position + run.rows).div_ceil(KV_BLOCK)
    }

    /// Computes the weights of all positions in the run's blocks, 0 where a query doesn't see them: [queries, positions].
    fn weigh(&self, scratch: &mut Scratch, run: Run, head: usize) {
        let (width, group, blocks) = (self.shape.head_dim, self.group(), self.blocks(run));
        let (queries, span) = (run.rows * group, blocks.len() * KV_BLOCK);
        scratch.scores.resize(queries * span, 0.0);
        let sequence = &self.sequences[run.sequence];
        for (place, block) in blocks.clone().enumerate() {
            let keys = sequence.keys(self.shape, self.layer, head, block);
            for column in (0..KV_BLOCK).step_by(self.kernels.width()) {
                let out = &mut scratch.scores[place * KV_BLOCK + column..];
                self.kernels.product(
                    &scratch.queries,
                    width,
                    queries,
                    width,
                    &keys[column..],
                    KV_BLOCK,
                    out,
                    span,
                    false,
                );
            }
        }
        for (query, scores) in scratch.scores.chunks_exact_mut(span).enumerate() {
            let position = run.position + query / group;
            let start = blocks.start * KV_BLOCK;
            let (first, end) = (self.first_seen(position) - start, position + 1 - start);
            scores[..first].fill(0.0);
            scores[end..].fill(0.0);
            if let Some(cap) = self.soft_cap {
                self.kernels.cap(&mut scores[first..end], cap);
            }
            self.kernels.softmax(&mut scores[first..end]);
        }
    }

    /// Adds up the values by their weights: [queries, padded head width].
    fn sum_values(&self, scratch: &mut Scratch, run: Run, head: usize) {
        let (padded, blocks) = (self.shape.padded_dim(), self.blocks(run));
        let (queries, span) = (run.rows * self.group(), blocks.len() * KV_BLOCK);
        scratch.sums.resize(queries * padded, 0.0);
        let sequence = &self.sequences[run.sequence];
        for (place, block) in blocks.enumerate() {
            // What is behind the run's end may be left over from other tokens.
            let depth = KV_BLOCK.min(run.position + run.rows - block * KV_BLOCK);
            let values = sequence.values(self.shape, self.layer, head, block);
            for column in (0..padded).step_by(self.kernels.width()) {
                let (weights, out) = (&scratch.scores[place * KV_BLOCK..], &mut scratch.sums[column..]);
                self.kernels.product(weights, span, queries, depth, &values[column..], padded, out, padded, place > 0);
            }
        }
    }
}

impl CustomOp1 for Attention<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, _) = layout.shape().dims2()?;
        let qkv = floats(storage, layout)?;
        let mut out = vec![0.0; rows * self.heads * self.shape.head_dim];
        let target = Disjoint::new(&mut out);
        let tasks = self.runs.len() * self.shape.heads;
        (0..tasks).into_par_iter().for_each(|task| {
            self.attend(qkv, self.runs[task / self.shape.heads], task % self.shape.heads, &target);
        });
        Ok((CpuStorage::F32(out), (rows, self.heads * self.shape.head_dim).into()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::kv::KvCache;

    const SHAPE: KvShape = KvShape { layers: 1, heads: 2, head_dim: 6 };
    const HEADS: usize = 6;
    const TOKENS: usize = 101;

    fn number(seed: usize) -> f32 {
        ((seed * 7919 % 4001) as f32 - 2000.0) / 1000.0
    }

    /// Attention of one row, by the book.
    fn expected(qkv: &[f32], row: usize, window: Option<usize>, cap: Option<f32>) -> Vec<f32> {
        let (width, row_width) = (SHAPE.head_dim, (HEADS + 2 * SHAPE.heads) * SHAPE.head_dim);
        let first = window.map_or(0, |window| (row + 1).saturating_sub(window));
        let at = |row: usize, head: usize| &qkv[row * row_width + head * width..][..width];
        let mut out = Vec::new();
        for head in 0..HEADS {
            let shared = head / (HEADS / SHAPE.heads);
            let scores: Vec<f64> = (first..=row)
                .map(|seen| {
                    let pairs = at(row, head).iter().zip(at(seen, HEADS + shared));
                    let score: f64 = pairs.map(|(query, key)| f64::from(query * key)).sum();
                    cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let all: f64 = scores.iter().map(|score| score.exp()).sum();
            out.extend((0..width).map(|place| {
                let values = (first..=row).map(|seen| f64::from(at(seen, HEADS + SHAPE.heads + shared)[place]));
                values.zip(&scores).map(|(value, score)| value * score.exp() / all).sum::<f64>() as f32
            }));
        }
        out
    }

    #[test]
    fn every_row_is_attended_by_the_book_and_bitwise_the_same_in_any_run() {
        let row_width = (HEADS + 2 * SHAPE.heads) * SHAPE.head_dim;
        let qkv: Vec<f32> = (0..TOKENS * row_width).map(number).collect();
        let mut cache = KvCache::new(SHAPE, 100, 1);
        let id = cache.open().unwrap();
        cache.grow(&[(id, TOKENS)]).unwrap();
        let mut sequences = cache.take(&[id]).unwrap();
        for (position, row) in qkv.chunks_exact(row_width).enumerate() {
            let (keys, values) = row[HEADS * SHAPE.head_dim..].split_at(SHAPE.heads * SHAPE.head_dim);
            sequences[0].write(&SHAPE, 0, position, keys, values).unwrap();
        }
        for kernels in Kernels::available() {
            for (window, soft_cap) in [(None, None), (Some(7), None), (Some(40), Some(2.0)), (Some(500), None)] {
                let attend = |runs: &[Run]| -> Vec<f32> {
                    let op = Attention {
                        kernels,
                        shape: &SHAPE,
                        sequences: &sequences,
                        runs,
                        heads: HEADS,
                        layer: 0,
                        window,
                        soft_cap,
                    };
                    let rows = Tensor::from_vec(qkv.clone(), (TOKENS, row_width), &Device::Cpu).unwrap();
                    rows.apply_op1_no_bwd(&op).unwrap().flatten_all().unwrap().to_vec1().unwrap()
                };
                let run = |position, rows| Run { sequence: 0, first_row: position, rows, position };
                let alone = attend(&(0..TOKENS).map(|position| run(position, 1)).collect::<Vec<_>>());
                for (row, found) in alone.chunks_exact(HEADS * SHAPE.head_dim).enumerate() {
                    for (found, expected) in found.iter().zip(expected(&qkv, row, window, soft_cap)) {
                        assert!((found - expected).abs() < 1e-5, "row {row}: {found} {expected}");
                    }
                }
                assert_eq!(attend(&[run(0, 30), run(30, 5), run(35, 1), run(36, 65)]), alone);
            }
        }
    }
}

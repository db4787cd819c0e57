//! Decoders of the Llama kind on candle tensors, for many sequences at once.
//!
//! Weights stay as they are stored, packed into panels. The activations of a step are candle tensors; projections,
//! norms, rotation and attention are custom ops of candle, with kernels that are compiled for several sets of
//! instructions and chosen when the program runs. A row's arithmetic never depends on the other rows of a step.

pub mod aligned;
mod attention;
pub mod batch;
pub mod config;
pub mod decoder;
pub mod error;
pub mod kernels;
pub mod kv;
pub mod linear;
pub mod model;
mod ops;
pub mod packed;
pub mod stored;
mod tensors;
pub mod weights;

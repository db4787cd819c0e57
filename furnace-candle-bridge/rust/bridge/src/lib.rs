//! The Python module `furnace_candle_bridge._native`: what crosses is checked here, the work is done without the GIL,
//! and no panic goes through.

mod buffer;
mod errors;

use std::sync::{Arc, Mutex, PoisonError};

use furnace_candle_decoder::batch::{Chunk, Output};
use furnace_candle_decoder::config::{Bounds, Config, LayerConfig, Rope};
use furnace_candle_decoder::decoder::Decoder;
use furnace_candle_decoder::kernels::{Activation, Kernels};
use furnace_candle_decoder::model::{Model, thread_pool};
use furnace_candle_decoder::stored::StoredType;
use furnace_candle_decoder::weights::Weights;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rayon::ThreadPool;

use crate::buffer::Rows;
use crate::errors::guarded;

/// What is read of a `DecoderSpec`.
#[derive(FromPyObject)]
struct Spec {
    vocab_size: usize,
    hidden_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    rms_norm_eps: f32,
    activation: String,
    embedding_scale: f32,
    attention_scale: Option<f32>,
    residual_scale: f32,
    logit_scale: f32,
    attention_soft_cap: Option<f32>,
    logit_soft_cap: Option<f32>,
}

impl Spec {
    fn config(self, ropes: Vec<(Vec<f32>, Vec<f32>)>, layers: Vec<(Option<usize>, Option<usize>)>) -> PyResult<Config> {
        Ok(Config {
            activation: match self.activation.as_str() {
                "silu" => Activation::Silu,
                "gelu_tanh" => Activation::GeluTanh,
                other => return Err(PyValueError::new_err(format!("the activation {other:.32} is not known"))),
            },
            attention_scale: self.attention_scale.unwrap_or(1.0 / (self.head_dim as f32).sqrt()),
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            intermediate_size: self.intermediate_size,
            rms_norm_eps: self.rms_norm_eps,
            embedding_scale: self.embedding_scale,
            residual_scale: self.residual_scale,
            logit_scale: self.logit_scale,
            attention_soft_cap: self.attention_soft_cap,
            logit_soft_cap: self.logit_soft_cap,
            ropes: ropes.into_iter().map(|(frequencies, scales)| Rope { frequencies, scales }).collect(),
            layers: layers.into_iter().map(|(window, rope)| LayerConfig { window, rope }).collect(),
        })
    }
}

/// Takes weights in, one after the other, and then makes the model.
#[pyclass(frozen, module = "furnace_candle_bridge._native")]
struct Loader {
    weights: Mutex<Weights>,
    pool: ThreadPool,
}

impl Loader {
    fn weights(&self) -> std::sync::MutexGuard<'_, Weights> {
        // A panic leaves out the tensor that was being packed, which `build` finds missing.
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Loader {
    #[new]
    fn new(py: Python<'_>, threads: usize) -> PyResult<Self> {
        guarded(py, || Ok(Loader { weights: Mutex::new(Weights::new()), pool: thread_pool(threads)? }))
    }

    /// Packs a matrix from its stored bytes, which are not needed any more afterwards.
    fn matrix(
        &self,
        py: Python<'_>,
        role: &str,
        stored_type: &str,
        shape: (usize, usize),
        rows: PyBuffer<u8>,
    ) -> PyResult<()> {
        if !rows.is_c_contiguous() {
            return Err(PyValueError::new_err("the rows of a matrix must lie behind each other"));
        }
        // SAFETY: the buffer is held until the end of the call, contiguous, and of so many bytes. Nobody writes to it: it
        // is a view of a mapped file, or an array that the caller has just made.
        let bytes = unsafe { std::slice::from_raw_parts(rows.buf_ptr().cast::<u8>(), rows.len_bytes()) };
        guarded(py, || {
            let mut guard = self.weights();
            let weights = &mut *guard;
            self.pool.install(|| weights.add_matrix(role, stored_type, shape.0, shape.1, bytes))
        })
    }

    /// Takes a norm's weight or a bias.
    fn vector(&self, py: Python<'_>, role: &str, values: PyBuffer<f32>) -> PyResult<()> {
        self.weights().add_vector(role, values.to_vec(py)?);
        Ok(())
    }

    /// Makes the model; the loader is empty afterwards.
    fn build(
        &self,
        py: Python<'_>,
        spec: Spec,
        ropes: Vec<(Vec<f32>, Vec<f32>)>,
        layers: Vec<(Option<usize>, Option<usize>)>,
    ) -> PyResult<NativeModel> {
        let config = spec.config(ropes, layers)?;
        let weights = std::mem::take(&mut *self.weights());
        let threads = self.pool.current_num_threads();
        Ok(NativeModel(Arc::new(guarded(py, || Model::new(config, weights, threads))?)))
    }
}

/// Weights and threads.
#[pyclass(frozen, name = "Model", module = "furnace_candle_bridge._native")]
struct NativeModel(Arc<Model>);

#[pymethods]
impl NativeModel {
    /// `avx512vnni`, `avx512`, `avx2` or `portable`.
    #[getter]
    fn kernels(&self) -> &'static str {
        self.0.kernels()
    }

    /// Gives the model a KV cache; it may have several, which are used one at a time.
    #[pyo3(signature = (*, max_context, max_open, kv_blocks))]
    fn decoder(
        &self,
        py: Python<'_>,
        max_context: usize,
        max_open: usize,
        kv_blocks: usize,
    ) -> PyResult<NativeDecoder> {
        let bounds = Bounds { max_context, max_open, kv_blocks };
        Ok(NativeDecoder(guarded(py, || Decoder::new(Arc::clone(&self.0), bounds))?))
    }
}

/// A model with its KV cache. States are numbers, which are never given out again.
#[pyclass(frozen, name = "Decoder", module = "furnace_candle_bridge._native")]
struct NativeDecoder(Decoder);

#[pymethods]
impl NativeDecoder {
    /// Blocks of the KV cache in use.
    #[getter]
    fn kv_blocks_used(&self) -> usize {
        self.0.cache().used()
    }

    fn open(&self, py: Python<'_>) -> PyResult<u64> {
        guarded(py, || self.0.cache().open())
    }

    fn release(&self, py: Python<'_>, state: u64) -> PyResult<()> {
        guarded(py, || self.0.cache().release(state))
    }

    fn fork(&self, py: Python<'_>, state: u64, length: usize) -> PyResult<u64> {
        guarded(py, || self.0.cache().fork(state, length))
    }

    fn truncate(&self, py: Python<'_>, state: u64, length: usize) -> PyResult<()> {
        guarded(py, || self.0.cache().truncate(state, length))
    }

    /// Appends chunks to their states in one forward pass.
    ///
    /// Chunk i has `counts[i]` of the tokens, the first of which is at `positions[i]`; `outputs[i]` is 0 for no rows, 1
    /// for the last one, 2 for all, and 3 for all hidden ones.
    fn step(
        &self,
        py: Python<'_>,
        states: Vec<u64>,
        positions: Vec<usize>,
        counts: Vec<usize>,
        outputs: Vec<u8>,
        tokens: Vec<i64>,
    ) -> PyResult<Rows> {
        let batch = chunks(&states, &positions, &counts, &outputs, &tokens)?;
        Ok(Rows::new(guarded(py, || self.0.step(&batch))?))
    }

    /// Ends all states.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        guarded(py, || {
            self.0.cache().clear();
            Ok(())
        })
    }

    /// Lets every step panic that has this token: for tests of what happens then.
    fn _panic_on(&self, token: Option<u32>) {
        self.0.panic_on(token);
    }
}

fn chunks(
    states: &[u64],
    positions: &[usize],
    counts: &[usize],
    outputs: &[u8],
    tokens: &[i64],
) -> PyResult<Vec<Chunk>> {
    if [positions.len(), counts.len(), outputs.len()] != [states.len(); 3] {
        return Err(PyValueError::new_err("the arrays of a step have different lengths"));
    }
    let mut rest = tokens;
    let mut batch = Vec::with_capacity(states.len());
    for (place, &state) in states.iter().enumerate() {
        let Some((tokens, behind)) = rest.split_at_checked(counts[place]) else {
            return Err(PyValueError::new_err("there are fewer tokens than the chunks have"));
        };
        rest = behind;
        let output = match outputs[place] {
            0 => Output::None,
            1 => Output::Last,
            2 => Output::All,
            3 => Output::Hidden,
            other => return Err(PyValueError::new_err(format!("{other} is no output"))),
        };
        batch.push(Chunk { state, tokens: tokens.to_vec(), position: positions[place], output });
    }
    if !rest.is_empty() {
        return Err(PyValueError::new_err("there are more tokens than the chunks have"));
    }
    Ok(batch)
}

/// The types of weights that are computed with as they are stored.
#[pyfunction]
fn stored_types() -> Vec<&'static str> {
    StoredType::names()
}

/// The names of the kernels that this processor can run, the best first.
#[pyfunction]
fn available_kernels() -> Vec<&'static str> {
    Kernels::available().iter().map(Kernels::name).collect()
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{Loader, NativeDecoder, NativeModel, Rows, available_kernels, stored_types};
}

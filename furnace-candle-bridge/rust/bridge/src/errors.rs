//! Errors as Python's exceptions.

use std::panic::{AssertUnwindSafe, catch_unwind};

use furnace_candle_decoder::decoder::panic_text;
use furnace_candle_decoder::error::Error;
use pyo3::exceptions::{PyIndexError, PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Calls something without the GIL. An error becomes the exception that furnace expects for it, and a panic becomes a
/// `RuntimeError`: pyo3's own `PanicException` is no `Exception`, and would end the model's thread.
pub(crate) fn guarded<T: Send>(py: Python<'_>, call: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    let result = py.detach(|| catch_unwind(AssertUnwindSafe(call)));
    let result = result.unwrap_or_else(|panic| Err(Error::Failed(panic_text(&*panic))));
    result.map_err(|error| exception(py, &error))
}

fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Invalid(_) => PyValueError::new_err(text),
        Error::UnknownToken(_) => PyIndexError::new_err(text),
        Error::OutOfMemory(_) => PyMemoryError::new_err(text),
        Error::Failed(_) => PyRuntimeError::new_err(text),
        Error::OutOfKv(_) => out_of_kv(py, text).unwrap_or_else(|error| error),
    }
}

fn out_of_kv(py: Python<'_>, text: String) -> PyResult<PyErr> {
    let class = py.import("furnace.contracts")?.getattr("OutOfKvError")?;
    Ok(PyErr::from_value(class.call1((text,))?))
}

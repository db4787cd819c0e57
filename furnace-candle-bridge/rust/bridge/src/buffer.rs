//! Rows of floats that numpy reads where they are.

use std::ffi::{c_int, c_void};
use std::ptr;

use furnace_candle_decoder::model;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// The rows that a step returned, float32 [rows, width], by the buffer protocol; who reads them may overwrite them.
#[pyclass(module = "furnace_candle_bridge._native")]
pub(crate) struct Rows {
    values: Vec<f32>,
    shape: [isize; 2],
    strides: [isize; 2],
}

const ITEM: usize = size_of::<f32>();

impl Rows {
    pub fn new(rows: model::Rows) -> Self {
        // A slice has at most isize::MAX bytes.
        let count = rows.values.len().checked_div(rows.width).unwrap_or(0);
        Rows {
            values: rows.values,
            shape: [count as isize, rows.width as isize],
            strides: [(rows.width * ITEM) as isize, ITEM as isize],
        }
    }
}

#[pymethods]
impl Rows {
    /// Fills a `Py_buffer` in, as the C API's documentation of buffer structures says.
    ///
    /// # Safety
    /// Called by Python, with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        let wanted = |flag: c_int| flags & flag == flag;
        let mut rows = slf.borrow_mut();
        // SAFETY: Python gave the view. What it points into belongs to the object, which the view keeps alive and in its
        // place: `values` never grows, and the rest lies in the object itself.
        unsafe {
            (*view).buf = rows.values.as_mut_ptr().cast::<c_void>();
            (*view).len = (rows.values.len() * ITEM) as isize;
            (*view).readonly = 0;
            (*view).itemsize = ITEM as isize;
            (*view).format = if wanted(ffi::PyBUF_FORMAT) { c"f".as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).ndim = if wanted(ffi::PyBUF_ND) { 2 } else { 1 };
            (*view).shape = if wanted(ffi::PyBUF_ND) { rows.shape.as_mut_ptr() } else { ptr::null_mut() };
            (*view).strides = if wanted(ffi::PyBUF_STRIDES) { rows.strides.as_mut_ptr() } else { ptr::null_mut() };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
            drop(rows);
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }
}

//! What can go wrong, in the classes that Python tells apart.

use std::fmt;

/// An error; the text of each says what to do about it, if anything can be done.
#[derive(Debug)]
pub enum Error {
    /// The call makes no sense; nothing has changed.
    Invalid(String),
    /// A token is not in the vocabulary; nothing has changed.
    UnknownToken(String),
    /// The KV cache has no room; nothing has changed.
    OutOfKv(String),
    /// The machine has no memory for something; nothing has changed.
    OutOfMemory(String),
    /// The computation failed, as by a panic; no state has changed.
    Failed(String),
}

/// What functions here return.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(text)
            | Error::UnknownToken(text)
            | Error::OutOfKv(text)
            | Error::OutOfMemory(text)
            | Error::Failed(text) => formatter.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::Failed(error.to_string())
    }
}

/// An `Error::Invalid` as the result of a check.
pub(crate) fn invalid<T>(text: String) -> Result<T> {
    Err(Error::Invalid(text))
}

//! Errors: operator, argument, value and expectation.

use std::{borrow::Cow, fmt};

/// A rejected call.
///
/// Opaque, so that fields can be added. Its text always reads `operator: message`, for example
/// `attention.plan: request 3: last_page_len = 17 is not in 1..=16`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    operator: Cow<'static, str>,
    message: String,
    kind: ErrorKind,
}

/// The kind of an error, for callers that handle some kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is invalid.
    #[default]
    Input,
    /// The backend lacks this operator, or a problem that it describes.
    Unsupported,
    /// The device or its driver failed.
    Device,
}

/// [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `operator` (its path, as in `attention.plan`) whose `message` names argument, value and
    /// expectation.
    pub fn new(operator: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { operator: operator.into(), message: message.into(), kind: ErrorKind::Input }
    }

    /// The same error of another kind.
    #[must_use]
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }

    /// The kind; [`Error::new`] makes errors of [`ErrorKind::Input`].
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The operator that rejected the call, for example `attention.plan`.
    pub fn operator(&self) -> &str {
        &self.operator
    }

    /// The message without the operator.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operator, self.message)
    }
}

impl std::error::Error for Error {}

/// `ensure!(condition, "attention.plan", "request {r}: …")`: returns an [`Error`](crate::Error) of that
/// operator unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $operator:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Error::new($operator, format!($($message)+)));
        }
    };
}

//! Start of a bench without a GPU: prints why it is skipped.

use std::fmt::Display;

/// Unwraps an opened device, stream or context; without a GPU, prints the reason.
pub(crate) fn or_skip<T, E: Display>(opened: Result<T, E>) -> Option<T> {
    opened.inspect_err(|why| println!("skipped: {why}")).ok()
}

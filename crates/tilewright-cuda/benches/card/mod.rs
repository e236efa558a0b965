//! How benches begin: with a GPU, or with a line that says why there is nothing to time.

use std::fmt::Display;

/// What was opened, a card or its stream or context; without a GPU it says why, and the bench is over.
pub(crate) fn or_skipped<T, E: Display>(opened: Result<T, E>) -> Option<T> {
    opened.inspect_err(|why| println!("skipped: {why}")).ok()
}

//! Source-line attribution for library functions.

use super::Builder;
use std::panic::Location;

/// A guard: while it exists, recorded instructions are attributed to one source line.
#[derive(Debug)]
#[must_use = "attribution ends when the guard is dropped"]
pub struct LineGuard<'k> {
    builder: &'k Builder,
    /// Whether an outer guard already set the line, which then stays.
    nested: bool,
}

impl Drop for LineGuard<'_> {
    fn drop(&mut self) {
        if !self.nested {
            self.builder.0.borrow_mut().line = None;
        }
    }
}

impl Builder {
    /// Attributes instructions to `line` until the guard is dropped. Library functions use it so that profilers show the
    /// caller's line. An outer guard takes precedence.
    pub fn at_line(&self, line: &'static Location<'static>) -> LineGuard<'_> {
        let mut state = self.0.borrow_mut();
        let nested = state.line.is_some();
        if !nested {
            state.line = Some(line);
        }
        LineGuard { builder: self, nested }
    }
}

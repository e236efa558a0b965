//! Whose line of the source instructions are put down to, where that is not the line that records them.

use super::Builder;
use std::panic::Location;

/// While it lives, what is recorded is put down to one line.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct AtLine<'k> {
    builder: &'k Builder,
    /// Whether a verb around this one has said another line, which stays.
    inner: bool,
}

impl Drop for AtLine<'_> {
    fn drop(&mut self) {
        if !self.inner {
            self.builder.0.borrow_mut().line = None;
        }
    }
}

impl Builder {
    /// Puts all that follows down to `line`, until what is given is dropped: for verbs, whose callers' lines tell more than
    /// their own. Within another verb, that one's line stays.
    pub fn at_line(&self, line: &'static Location<'static>) -> AtLine<'_> {
        let mut state = self.0.borrow_mut();
        let inner = state.line.is_some();
        if !inner {
            state.line = Some(line);
        }
        AtLine { builder: self, inner }
    }
}

//! Ctrl-C: the first one ends the generation after the current step, a second one ends the process.

use miette::{IntoDiagnostic, Result};
use signal_hook::{consts::SIGINT, flag};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Exit code of an interrupted run: 128 plus the signal's number, as in shells.
pub(super) const EXIT_CODE: u8 = 128 + SIGINT as u8;

/// Whether Ctrl-C was pressed.
#[derive(Debug, Clone)]
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Handles Ctrl-C from now on.
    pub(super) fn install() -> Result<Self> {
        let pressed = Arc::new(AtomicBool::new(false));
        // Registered first, so that it tests the flag before the first Ctrl-C sets it.
        flag::register_conditional_shutdown(SIGINT, EXIT_CODE.into(), Arc::clone(&pressed))
            .into_diagnostic()?;
        flag::register(SIGINT, Arc::clone(&pressed)).into_diagnostic()?;
        Ok(Self(pressed))
    }

    pub(super) fn is_pressed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

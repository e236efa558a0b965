//! Work that is done once for each key of a process: who asks while it is under way waits for it.
//!
//! What succeeded is kept as long as the cache is: kernels are few, and have some 50 KB. What failed is told to all who waited,
//! and tried again for the next who asks.

use super::{Code, Held, Key, Result};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

type Slot = Arc<OnceLock<Result<Held>>>;

#[derive(Debug, Default)]
pub(super) struct Flights {
    slots: Mutex<HashMap<Key, Slot>>,
}

impl Flights {
    /// What `work` makes, or what it made for another who asked for `key`.
    pub(super) fn once(&self, key: Key, work: impl FnOnce() -> Result<Held>) -> Result<Held> {
        let slot = Arc::clone(self.slots().entry(key).or_default());
        let outcome = slot.get_or_init(work).clone();
        if outcome.is_err() {
            self.slots().retain(|_, kept| !Arc::ptr_eq(kept, &slot));
        }
        outcome
    }

    /// Does not keep `code` any more, if it is what is kept under `key`.
    pub(super) fn forget(&self, key: Key, code: &Arc<Code>) {
        let is_it = |slot: &Slot| matches!(slot.get(), Some(Ok((kept, _))) if Arc::ptr_eq(kept, code));
        self.slots().retain(|at, slot| *at != key || !is_it(slot));
    }

    /// The slots. A thread that panicked left them whole: nothing is done under this lock but to look and to exchange.
    fn slots(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

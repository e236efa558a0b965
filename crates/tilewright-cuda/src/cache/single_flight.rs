//! Single-flight execution: concurrent requests for one key share one execution of the work.
//!
//! Results are kept as long as the cache: a process has few kernels, of about 50 KB each. All waiting threads get the error of a
//! failed execution; the next request tries again.

use super::{Code, FoundCode, KernelKey, Result};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

type Slot = Arc<OnceLock<Result<FoundCode>>>;

#[derive(Debug, Default)]
pub(super) struct SingleFlight {
    slots: Mutex<HashMap<KernelKey, Slot>>,
}

impl SingleFlight {
    /// Runs `work`, or returns the result of an earlier or concurrent run for `key`.
    pub(super) fn run_once(
        &self,
        key: KernelKey,
        work: impl FnOnce() -> Result<FoundCode>,
    ) -> Result<FoundCode> {
        let slot = Arc::clone(self.slots().entry(key).or_default());
        let outcome = slot.get_or_init(work).clone();
        if outcome.is_err() {
            self.slots().retain(|_, kept| !Arc::ptr_eq(kept, &slot));
        }
        outcome
    }

    /// Drops the result under `key` if it is `code`.
    pub(super) fn forget(&self, key: KernelKey, code: &Arc<Code>) {
        let is_it = |slot: &Slot| matches!(slot.get(), Some(Ok((kept, _))) if Arc::ptr_eq(kept, code));
        self.slots().retain(|at, slot| *at != key || !is_it(slot));
    }

    /// The slots. Ignores poisoning: the map is consistent at every point where a thread can panic under this lock.
    fn slots(&self) -> MutexGuard<'_, HashMap<KernelKey, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The CPU backend: executes the same plans as a GPU, on a pool of threads.

use crate::Backend;
use std::sync::Arc;

/// The CPU backend: a thread pool. Cheap to clone; clones share the pool.
#[derive(Debug, Clone)]
pub struct Cpu {
    pub(crate) pool: Arc<rayon::ThreadPool>,
}

impl Cpu {
    /// As many threads as the machine has.
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Exactly `threads` threads, at least one.
    pub fn with_threads(threads: usize) -> Self {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("tilewright-{i}"))
            .build()
            .expect("the operating system gives threads");
        Self { pool: Arc::new(pool) }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for Cpu {
    fn describe(&self) -> String {
        format!("cpu: {} threads", self.pool.current_num_threads())
    }
}

//! Batches of decode requests, for benches of plans.

use std::sync::Arc;
use tilewright::{Batch, PageTable};

pub(crate) const PAGE_SIZE: usize = 16;
/// Kinds of KV lengths.
pub(crate) const LENGTHS: [&str; 3] = ["even", "one long", "random"];

/// One query row per request, and pages in descending order.
pub(crate) struct DecodeBatch {
    pub(crate) lengths: &'static str,
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) indptr: Vec<i32>,
    pub(crate) indices: Arc<Vec<i32>>,
    pub(crate) last_page_len: Vec<i32>,
}

impl DecodeBatch {
    pub(crate) fn new(requests: usize, lengths: &'static str) -> Self {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            1 + (state >> 33) as usize % 8192
        };
        let kv_len = |r: usize| match lengths {
            "even" => 4096,
            "one long" if r + 1 == requests => 65_536,
            "one long" => 256,
            _ => random(),
        };
        let kv_lens: Vec<usize> = (0..requests).map(kv_len).collect();
        let mut indptr = vec![0_i32];
        kv_lens.iter().for_each(|len| indptr.push(indptr[indptr.len() - 1] + len.div_ceil(PAGE_SIZE) as i32));
        Self {
            lengths,
            qo_indptr: (0..=requests as i32).collect(),
            indices: Arc::new((0..indptr[requests]).rev().collect()),
            indptr,
            last_page_len: kv_lens.iter().map(|len| ((len - 1) % PAGE_SIZE + 1) as i32).collect(),
        }
    }

    pub(crate) fn requests(&self) -> usize {
        self.last_page_len.len()
    }

    /// Batches whose plans copy the page indices, and share them.
    pub(crate) fn copied_and_shared(&self) -> [Batch<'_>; 2] {
        let copied = PageTable::new(&self.indptr, &self.indices[..], &self.last_page_len, PAGE_SIZE);
        let shared = PageTable::new(&self.indptr, &self.indices, &self.last_page_len, PAGE_SIZE);
        [copied, shared].map(|table| Batch::paged(&self.qo_indptr, table))
    }
}

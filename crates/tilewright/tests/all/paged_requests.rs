//! Arrays of a batch of requests, whose pages are numbered in order.

use crate::sample::Lens;
use tilewright::{Batch, PageTable};

/// Requests, and the pages of each.
#[derive(Debug, Clone)]
pub(crate) struct PagedRequests {
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) kv_indptr: Vec<i32>,
    pub(crate) indices: Vec<i32>,
    pub(crate) last_page_len: Vec<i32>,
    pub(crate) page_size: usize,
}

impl PagedRequests {
    pub(crate) fn new(lens: &[Lens], page_size: usize) -> Self {
        let indptr = |count: &dyn Fn(&Lens) -> usize| {
            let mut sums = vec![0];
            lens.iter().for_each(|lens| sums.push(sums[sums.len() - 1] + count(lens) as i32));
            sums
        };
        let kv_indptr = indptr(&|lens| lens.1.div_ceil(page_size));
        Self {
            qo_indptr: indptr(&|lens| lens.0),
            indices: (0..kv_indptr[lens.len()]).collect(),
            kv_indptr,
            last_page_len: lens.iter().map(|lens| last_page_len(lens.1, page_size)).collect(),
            page_size,
        }
    }

    /// Makes the first `count` pages of all requests the same.
    #[allow(dead_code, reason = "for tests of the planner; the suite of the GPU backend has this file too")]
    pub(crate) fn share(&mut self, count: usize) {
        for bounds in self.kv_indptr.windows(2) {
            let pages = &mut self.indices[bounds[0] as usize..bounds[1] as usize];
            pages.iter_mut().take(count).zip(0..).for_each(|(page, number)| *page = number);
        }
    }

    pub(crate) fn table(&self) -> PageTable<'_> {
        PageTable::new(&self.kv_indptr, &self.indices, &self.last_page_len, self.page_size)
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch::paged(&self.qo_indptr, self.table())
    }
}

fn last_page_len(kv_len: usize, page_size: usize) -> i32 {
    if kv_len == 0 { 0 } else { ((kv_len - 1) % page_size + 1) as i32 }
}

//! Stores a sample's keys and values in pages or a ragged tensor, with NaN in all unused slots.

use crate::{elements::Elements, generator::Generator, paged_requests::PagedRequests, sample::Sample};
use tilewright::{Batch, KvCache, KvLayout};

/// The KV storage kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    Ragged,
    Paged(usize),
}

/// A stored batch.
pub(crate) struct Stored {
    /// With pages of one token for a ragged tensor.
    pub(crate) requests: PagedRequests,
    storage: Storage,
    k: (Elements, Vec<usize>),
    v: (Elements, Vec<usize>),
}

impl Stored {
    /// Stores `sample` in its problem's layout; `seed` determines the page order in the pool. The pool has unused
    /// pages.
    pub(crate) fn new(sample: &Sample, storage: Storage, seed: u64) -> Self {
        let page_size = if let Storage::Paged(page_size) = storage { page_size } else { 1 };
        let mut requests = PagedRequests::new(&sample.lens, page_size);
        let mut count = requests.indices.len();
        if storage != Storage::Ragged {
            count += 2;
            let order = Generator::new(seed).permutation(count);
            requests.indices.iter_mut().zip(order).for_each(|(page, number)| *page = number as i32);
        }
        let pool = Pool { sample, storage, count, indptr: &requests.kv_indptr, indices: &requests.indices };
        let dim = sample.problem.head_dim();
        let (k, v) = (pool.fill(&sample.k, dim.qk), pool.fill(&sample.v, dim.vo));
        Self { requests, storage, k, v }
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        match self.storage {
            Storage::Ragged => Batch::ragged(&self.requests.qo_indptr, &self.requests.kv_indptr),
            Storage::Paged(_) => self.requests.batch(),
        }
    }

    /// All elements of K in memory order.
    pub(crate) fn keys(&self) -> Vec<f32> {
        self.k.0.to_f32()
    }

    pub(crate) fn cache(&self) -> KvCache<'_> {
        KvCache { k: self.k.0.view(&self.k.1), v: self.v.0.view(&self.v.1) }
    }
}

/// The slots of all tokens.
struct Pool<'a> {
    sample: &'a Sample,
    storage: Storage,
    /// Pages, or tokens of a ragged tensor.
    count: usize,
    indptr: &'a [i32],
    indices: &'a [i32],
}

impl Pool<'_> {
    /// One of K and V with its shape, from `[kv_len, num_kv_heads, dim]` per request.
    fn fill(&self, requests: &[Vec<f32>], dim: usize) -> (Elements, Vec<usize>) {
        let problem = &self.sample.problem;
        let (layout, heads) = (problem.layout(), problem.heads().kv);
        let shape = match (self.storage, layout) {
            (Storage::Paged(page_size), _) => layout.paged_shape(self.count, page_size, heads, dim).to_vec(),
            (Storage::Ragged, KvLayout::Nhd) => vec![self.count, heads, dim],
            (Storage::Ragged, KvLayout::Hnd) => vec![heads, self.count, dim],
        };
        let mut elements = Elements::filled(problem.dtype_kv(), shape.iter().product(), f32::NAN);
        for (r, request) in requests.iter().enumerate() {
            for (at, values) in request.chunks_exact(dim).enumerate() {
                let (token, head) = (at / heads, at % heads);
                elements.write(self.offset(r, token, head) * dim, values);
            }
        }
        (elements, shape)
    }

    /// The index of `head` of `token` of request `r`, in rows of head_dim elements.
    fn offset(&self, r: usize, token: usize, head: usize) -> usize {
        let heads = self.sample.problem.heads().kv;
        let first = self.indptr[r] as usize;
        match (self.storage, self.sample.problem.layout()) {
            (Storage::Ragged, KvLayout::Nhd) => (first + token) * heads + head,
            (Storage::Ragged, KvLayout::Hnd) => head * self.count + first + token,
            (Storage::Paged(page_size), layout) => {
                let (page, slot) = (self.indices[first + token / page_size] as usize, token % page_size);
                match layout {
                    KvLayout::Nhd => (page * page_size + slot) * heads + head,
                    KvLayout::Hnd => (page * heads + head) * page_size + slot,
                }
            }
        }
    }
}

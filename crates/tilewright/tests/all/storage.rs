//! Stores a sample's keys and values in pages or a ragged tensor, with NaN in all unused slots.

use crate::{elements::Elements, generator::Generator, sample::Sample};
use tilewright::{Batch, KvCache, KvLayout, PageTable};

/// The KV storage kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    Ragged,
    Paged(usize),
}

/// A stored batch.
pub(crate) struct Stored {
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) kv_indptr: Vec<i32>,
    pub(crate) indices: Vec<i32>,
    pub(crate) last_page_len: Vec<i32>,
    storage: Storage,
    k: (Elements, Vec<usize>),
    v: (Elements, Vec<usize>),
}

impl Stored {
    /// Stores `sample` in its problem's layout; `seed` determines the page order in the pool. The pool has unused
    /// pages.
    pub(crate) fn new(sample: &Sample, storage: Storage, seed: u64) -> Self {
        let indptr = |counts: &mut dyn Iterator<Item = usize>| -> Vec<i32> {
            let sums = counts.scan(0, |sum, count| {
                *sum += count as i32;
                Some(*sum)
            });
            std::iter::once(0).chain(sums).collect()
        };
        let per_slot = match storage {
            Storage::Ragged => 1,
            Storage::Paged(page_size) => page_size,
        };
        let qo_indptr = indptr(&mut sample.lens.iter().map(|l| l.0));
        let kv_indptr = indptr(&mut sample.lens.iter().map(|l| l.1.div_ceil(per_slot)));
        let owned = *kv_indptr.last().expect("it has a first entry") as usize;
        let (count, indices) = match storage {
            Storage::Ragged => (owned, (0..owned).collect()),
            Storage::Paged(_) => (owned + 2, Generator::new(seed).permutation(owned + 2)),
        };
        let indices: Vec<i32> = indices.into_iter().take(owned).map(|page| page as i32).collect();
        let last = |l: usize| if l == 0 { 0 } else { (l - 1) % per_slot + 1 };
        let last_page_len = sample.lens.iter().map(|l| last(l.1) as i32).collect();
        let pool = Pool { sample, storage, count, indptr: &kv_indptr, indices: &indices };
        let dim = sample.problem.head_dim();
        let (k, v) = (pool.fill(&sample.k, dim.qk), pool.fill(&sample.v, dim.vo));
        Self { qo_indptr, kv_indptr, indices, last_page_len, storage, k, v }
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        match self.storage {
            Storage::Ragged => Batch::ragged(&self.qo_indptr, &self.kv_indptr),
            Storage::Paged(_) => Batch::paged(&self.qo_indptr, self.table()),
        }
    }

    pub(crate) fn table(&self) -> PageTable<'_> {
        let Storage::Paged(page_size) = self.storage else { panic!("a ragged batch has no page table") };
        PageTable::new(&self.kv_indptr, &self.indices, &self.last_page_len, page_size)
    }

    /// Tokens per page; 1 for a ragged tensor.
    pub(crate) fn page_size(&self) -> usize {
        match self.storage {
            Storage::Ragged => 1,
            Storage::Paged(page_size) => page_size,
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
